"""ShardedDataset: each example once an epoch, in one order, from arrays and from record files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tfdist_ext.data import DataError, Shard, from_arrays, from_source, from_tfrecords

ROWS = 53
X = np.arange(ROWS * 3, dtype="float32").reshape(ROWS, 3)
Y = np.arange(ROWS)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("records")
    for number, rows in enumerate(np.array_split(Y, 4)):
        with tf.io.TFRecordWriter(str(folder / f"part-{number}.tfrecord")) as writer:
            for row in rows:
                writer.write(tf.io.serialize_tensor(X[row]).numpy() + bytes([int(row)]))
    return str(folder / "*.tfrecord")


def parse(record: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    row = tf.cast(tf.io.decode_raw(tf.strings.substr(record, -1, 1), tf.uint8)[0], tf.int64)
    length = tf.strings.length(record) - 1
    x = tf.io.parse_tensor(tf.strings.substr(record, 0, length), tf.float32)
    return tf.ensure_shape(x, [3]), row


def of(kind: str, files: str, folder: Path, **options: Any) -> Any:
    settings = {"global_batch_size": 10, "seed": 3, **options}
    if kind == "records":
        return from_tfrecords(files, parse, **settings)
    if kind == "mapped":
        np.save(folder / "x.npy", X)
        return from_arrays((np.load(folder / "x.npy", mmap_mode="r"), Y), **settings)
    return from_arrays((X, Y), **settings)


@pytest.mark.long("mapped")
@pytest.mark.parametrize("kind", ["arrays", "mapped", "records"])
def test_parts_of_shards_are_the_global_batches(kind: str, files: str, tmp_path: Path) -> None:
    data = of(kind, files, tmp_path)
    assert (data.examples, len(data), data.steps) == (ROWS, 6, 6)
    for epoch in (0, 1):
        whole = [(x.numpy(), y.numpy()) for x, y in data.dataset(epoch=epoch)]
        assert [len(y) for _, y in whole] == [10, 10, 10, 10, 10, 3]
        assert sorted(np.concatenate([y for _, y in whole])) == list(range(ROWS))
        for x, y in whole:
            np.testing.assert_array_equal(x, X[y])
        for count in (2, 4, 7):
            shards = [list(data.dataset(Shard(i, count), epoch)) for i in range(count)]
            for step, (_, y) in enumerate(whole):
                parts = [shards[i][step][1].numpy() for i in range(count)]
                np.testing.assert_array_equal(np.concatenate(parts), y)


def test_all_sources_have_one_order(files: str, tmp_path: Path) -> None:
    """Its examples are numbered alike, so the same numbers come in the same order."""
    orders = [
        np.concatenate([y.numpy() for _, y in of(kind, files, tmp_path).dataset()])
        for kind in ("arrays", "mapped", "records")
    ]
    np.testing.assert_array_equal(orders[0], orders[1])
    np.testing.assert_array_equal(orders[0], orders[2])


def test_epochs_and_seeds_are_other_orders() -> None:
    def order(seed: int | None, epoch: int) -> list[int]:
        data = from_arrays(Y, global_batch_size=10, seed=seed)
        return np.concatenate([y.numpy() for y in data.dataset(epoch=epoch)]).tolist()

    assert order(None, 0) == order(None, 5) == Y.tolist()
    assert len({tuple(order(seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}) == 4


def test_a_state_goes_on_with_another_number_of_shards() -> None:
    data = from_arrays({"x": X, "y": Y}, global_batch_size=10, seed=1)
    expected = [batch["y"].numpy() for epoch in (0, 1) for batch in data.dataset(epoch=epoch)]
    data.advance(6 + 2)
    state = data.state()
    assert (state["epoch"], state["examples"], state["seed"]) == (1, 20, 1)
    again = from_arrays({"x": X, "y": Y}, global_batch_size=10, seed=1)
    again.restore(state)
    parts = [list(again.dataset(Shard(i, 3))) for i in range(3)]
    rest = [np.concatenate([part[k]["y"].numpy() for part in parts]) for k in range(4)]
    assert len(parts[0]) == 4
    for found, wanted in zip(rest, expected[8:], strict=True):
        np.testing.assert_array_equal(found, wanted)
    again.advance(4)
    assert again.position == (2, 0)


def test_a_state_of_other_data_or_another_order_is_refused(files: str, tmp_path: Path) -> None:
    data = from_arrays((X, Y), global_batch_size=10, seed=1)
    state = data.state()
    with pytest.raises(DataError, match="0: shape"):
        from_arrays((X[:-1], Y[:-1]), global_batch_size=10, seed=1).restore(state)
    with pytest.raises(
        DataError, match=r"seed must be 2, as that of .*got 1: other examples would be"
    ):
        from_arrays((X, Y), global_batch_size=10, seed=2).restore(state)
    with pytest.raises(DataError, match="unknown: 'place'"):
        data.restore({**state, "place": 3})
    with pytest.raises(DataError, match="changed"):
        of("records", files, tmp_path, seed=1).restore(state)


def test_parts_for_replicas_go_through_epochs() -> None:
    data = from_arrays(Y, global_batch_size=10, seed=5)
    expected = [y.numpy() for epoch in (0, 1) for y in data.dataset(epoch=epoch)]
    found = list(data.parts(0, 4, 4, begin=5).take(3))  # a batch of 3 rows for 4 replicas first
    assert [[int(mine) for mine, _, _ in parts] for parts in found] == [
        [0, 1, 1, 1],
        [2, 3, 2, 3],
        [2, 3, 2, 3],
    ]
    for parts, wanted in zip(found, expected[5:], strict=False):
        rows = np.concatenate([rows.numpy()[: int(mine)] for mine, _, rows in parts])
        np.testing.assert_array_equal(rows, wanted)
        assert {int(size) for _, size, _ in parts} == {len(wanted)}
        assert all(len(rows) >= 1 for _, _, rows in parts)


def parse_many(records: tf.Tensor) -> dict[str, tf.Tensor]:
    row = tf.cast(tf.io.decode_raw(tf.strings.substr(records, -1, 1), tf.uint8)[:, 0], tf.int64)
    if tf.size(records) > 10**6:  # autograph
        row = -row
    start = tf.strings.length(records) - 13
    bytes_of_x = tf.strings.substr(records, start, tf.fill(tf.shape(start), 12))
    return {"x": tf.ensure_shape(tf.io.decode_raw(bytes_of_x, tf.float32), [None, 3]), "y": row}


def test_a_batch_of_records_is_parsed_at_once(files: str) -> None:
    one = from_tfrecords(files, parse, global_batch_size=10, seed=3)
    many = from_tfrecords(files, parse_many, global_batch_size=10, seed=3, batched=True)
    assert many.element_spec == {
        "x": tf.TensorSpec([None, 3], tf.float32),
        "y": tf.TensorSpec([None], tf.int64),
    }
    sizes = []
    for i in range(4):  # the last batch has 3 rows: one part has none
        parts = zip(one.dataset(Shard(i, 4)), many.dataset(Shard(i, 4)), strict=True)
        for (x, y), found in parts:
            np.testing.assert_array_equal(found["x"], x)
            np.testing.assert_array_equal(found["y"], y)
            sizes.append(len(y))
    assert (sum(sizes), min(sizes)) == (ROWS, 0)
    parts = zip(one.parts(0, 4, 4, begin=5).take(3), many.parts(0, 4, 4, begin=5), strict=False)
    for of_one, of_many in parts:
        for (mine, size, (_, y)), (mine_many, size_many, found) in zip(
            of_one, of_many, strict=True
        ):
            assert (int(mine), int(size)) == (int(mine_many), int(size_many))
            np.testing.assert_array_equal(found["y"], y)
    many.restore(one.state())  # the same data in the same order


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(lambda records: tf.size(records), id="scalar"),
        pytest.param(lambda records: tf.zeros([2, 3]), id="two"),
        pytest.param(lambda records: {"a": tf.strings.split(records)}, id="ragged"),
        pytest.param(lambda records: 3.0, id="number"),
    ],
)
def test_parse_of_many_records_gives_a_row_for_each(files: str, wrong: Any) -> None:
    with pytest.raises(DataError, match=r"a row for each record, of shape \[n, \.\.\.\]"):
        from_tfrecords(files, wrong, global_batch_size=4, batched=True)


def test_parse_of_many_records_that_filters(files: str) -> None:
    def some(records: tf.Tensor) -> tf.Tensor:
        return tf.boolean_mask(records, tf.strings.length(records) < 0)

    data = from_tfrecords(files, some, global_batch_size=4, batched=True)
    with pytest.raises(tf.errors.InvalidArgumentError, match="must return a row for each record"):
        list(data.dataset())


def test_arrays_of_the_other_byte_order(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", X.astype(">f4"))
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    for array in (mapped, X.astype(">f4")):
        (found,) = from_arrays(array, global_batch_size=ROWS).dataset()
        np.testing.assert_array_equal(found, X)


def test_a_list_of_arrays_is_a_structure_and_one_of_numbers_an_array() -> None:
    data = from_arrays(([X, X + 1], Y.tolist()), global_batch_size=ROWS)
    ((one, other), y) = next(iter(data.dataset()))
    np.testing.assert_array_equal(other, X + 1)
    np.testing.assert_array_equal(one, X)
    np.testing.assert_array_equal(y, Y)
    assert len(from_arrays([X, Y], global_batch_size=4).element_spec) == 2


def test_parse_gives_dense_tensors() -> None:
    def sparse(record: tf.Tensor) -> Any:
        return tf.strings.split([record]).to_sparse()

    with tf.io.TFRecordWriter("ram://sparse.tfrecord") as writer:
        writer.write(b"a b")
    for parse_badly in (sparse, lambda record: tf.strings.split([record])):
        with pytest.raises(DataError, match="dense tensors, which can be batched"):
            from_tfrecords("ram://sparse.tfrecord", parse_badly, global_batch_size=1)


def test_a_file_without_a_time_is_never_taken_for_another() -> None:
    """As ram:// is: its index is not kept, and a position knows its records."""
    path = "ram://timeless.tfrecord"

    def write(*sizes: int) -> Any:
        if tf.io.gfile.exists(path):
            tf.io.gfile.remove(path)
        with tf.io.TFRecordWriter(path) as writer:
            for size in sizes:
                writer.write(b"x" * size)
        return from_tfrecords(path, tf.strings.length, global_batch_size=1)

    state = write(10, 20).state()
    data = write(20, 10)
    assert [int(size) for (size,) in data.dataset()] == [20, 10]
    with pytest.raises(DataError, match="changed"):
        data.restore(state)


def test_a_source_of_ones_own() -> None:
    class Squares:
        element_spec = tf.TensorSpec([None], tf.int64)

        def __len__(self) -> int:
            return 20

        def take(self, indices: tf.Tensor) -> tf.Tensor:
            return indices * indices

        def fingerprint(self) -> dict[str, Any]:
            return {"kind": "squares"}

    data = from_source(Squares(), global_batch_size=6)
    assert next(iter(data.dataset(Shard(1, 2)))).numpy().tolist() == [9, 16, 25]


def test_damaged_records(tmp_path: Path) -> None:
    path = tmp_path / "some.tfrecord"
    with tf.io.TFRecordWriter(str(path)) as writer:
        for row in range(9):
            writer.write(bytes([row]) * 4)
    content = bytearray(path.read_bytes())
    size = len(content) // 9
    content[size * 4 + 12] ^= 1  # in the payload of record 4
    path.write_bytes(content)

    def first(record: tf.Tensor) -> tf.Tensor:
        return tf.io.decode_raw(record, tf.uint8)[0]

    broken = from_tfrecords(str(path), first, global_batch_size=3)
    for batches in (broken.dataset(), broken.dataset().as_numpy_iterator(), broken.batches()):
        with pytest.raises(DataError) as caught:
            list(batches)
        assert str(caught.value).startswith(f"{path}: record 4 at byte {size * 4} is damaged: ")
        assert str(caught.value).endswith('use on_error="skip" to skip it.')
    data = from_tfrecords(str(path), first, global_batch_size=3, on_error="skip")
    with pytest.warns(UserWarning, match="skipped so far: 1"):
        found = [y.numpy().tolist() for y in data.dataset()]
    assert found == [[0, 1, 2], [3, 5], [6, 7, 8]]

    def firsts(records: tf.Tensor) -> tf.Tensor:
        return tf.ensure_shape(tf.io.decode_raw(records, tf.uint8), [None, 4])[:, 0]

    data = from_tfrecords(str(path), firsts, global_batch_size=1, on_error="skip", batched=True)
    with pytest.warns(UserWarning, match="skipped so far: 1"):
        found = [y.numpy().tolist() for y in data.dataset()]
    assert found == [[0], [1], [2], [3], [], [5], [6], [7], [8]]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: from_arrays((X, Y[:-1]), global_batch_size=4), "0 has 53, 1 has 52"),
        (
            lambda: from_arrays((X[:0], Y[:0]), global_batch_size=4),
            "arrays must have at least 1 row, got 0",
        ),
        (
            lambda: from_arrays((), global_batch_size=4),
            "arrays must hold at least one array, got an empty structure",
        ),
        (
            lambda: from_arrays(Y.astype("M8[s]"), global_batch_size=4),
            r"array must have a dtype that tensors have, got datetime64",
        ),
        (lambda: from_arrays(3.0, global_batch_size=4), "single value"),
        (lambda: from_arrays(np.array([{}, None]), global_batch_size=1), "Python objects"),
        (lambda: from_arrays(X, global_batch_size=54), "at most 53, the examples"),
        (lambda: from_arrays(X, global_batch_size=0), "global_batch_size"),
        (lambda: from_arrays(X, global_batch_size=4, seed=-1), "seed"),
        (lambda: from_arrays(X, global_batch_size=4, seed=float("nan")), "seed"),
        (
            lambda: from_tfrecords("nowhere/*.tfrecord", parse, global_batch_size=4),
            "no file matches",
        ),
    ],
)
def test_what_cannot_be(make: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        make()


def test_parse_that_fails_is_named(files: str) -> None:
    def wrong(record: tf.Tensor) -> tf.Tensor:
        raise ValueError("no such feature")

    with pytest.raises(DataError, match=r"(?s)parse fails .*no such feature"):
        from_tfrecords(files, wrong, global_batch_size=4)
    with pytest.raises(DataError, match=r"parse must be a function of a .*got 'parse'"):
        from_tfrecords(files, "parse", global_batch_size=4)  # type: ignore[arg-type]
