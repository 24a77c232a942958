"""OrderedDataset: each example once an epoch, in one order, from arrays and from record files."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tfdist_ext.data import DataError, Shard, from_arrays, from_tfrecords
from tfdist_ext.data.batches import Position
from tfdist_ext.data.ordered import Order, OrderedBatches

ROWS = 53
X = np.arange(ROWS * 3, dtype="float32").reshape(ROWS, 3)
Y = np.arange(ROWS)
FIRST = [51, 3, 12, 4, 49, 44]  # examples with seed 3


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


def data_of(kind: str, files: str, **options: Any) -> Any:
    settings = {"global_batch_size": 10, "seed": 3, **options}
    if kind == "records":
        return from_tfrecords(files, parse, **settings)
    return from_arrays((X, Y), **settings)


@pytest.mark.parametrize("kind", ["arrays", "records"])
def test_parts_of_shards_are_the_global_batches(kind: str, files: str) -> None:
    data = data_of(kind, files)
    assert (data.examples, len(data), data.steps) == (ROWS, 6, 6)
    first = next(iter(data.dataset()))[1].numpy().tolist()
    assert first[:6] == FIRST  # of all sources: the order is one of numbers
    for epoch in (0, 1):
        whole = [(x.numpy(), y.numpy()) for x, y in data.dataset(epoch=epoch)]
        assert [len(y) for _, y in whole] == [10, 10, 10, 10, 10, 3]
        assert sorted(np.concatenate([y for _, y in whole])) == list(range(ROWS))
        for x, y in whole:
            np.testing.assert_array_equal(x, X[y])
        shards = [list(data.dataset(Shard(i, 7), epoch)) for i in range(7)]
        for step, (_, y) in enumerate(whole):
            parts = [shard[step][1].numpy() for shard in shards]
            np.testing.assert_array_equal(np.concatenate(parts), y)


def test_a_state_goes_on_with_other_shards_and_batches() -> None:
    data = from_arrays({"x": X, "y": Y}, global_batch_size=10, seed=1)
    expected = [batch["y"].numpy() for epoch in (0, 1) for batch in data.dataset(epoch=epoch)]
    data.advance(6 + 2)
    state = data.state()
    assert (state["epoch"], state["examples"], state["seed"]) == (1, 20, 1)
    again = from_arrays({"x": X, "y": Y}, global_batch_size=7, seed=1)
    again.restore(state)
    parts = [list(again.dataset(Shard(i, 3))) for i in range(3)]
    steps = -(-(ROWS - 20) // 7)
    assert len(parts[0]) == steps
    rest = [part[step]["y"].numpy() for step in range(steps) for part in parts]
    np.testing.assert_array_equal(np.concatenate(rest), np.concatenate(expected[8:]))
    again.advance(steps)
    assert again.position == (2, 0)


def test_a_state_of_other_data_or_another_order_is_refused(files: str) -> None:
    data = from_arrays((X, Y), global_batch_size=10, seed=1)
    state = data.state()
    with pytest.raises(DataError, match="0: shape"):
        from_arrays((X[:-1], Y[:-1]), global_batch_size=10, seed=1).restore(state)
    with pytest.raises(DataError, match="seed is 2, but the saved position has the seed 1"):
        from_arrays((X, Y), global_batch_size=10, seed=2).restore(state)
    wrong: list[dict[str, Any]] = [{"place": 3}, {"epoch": 1.0}, {"examples": 54}, {"seed": "1"}]
    for change in wrong:
        with pytest.raises(DataError, match=f"state must have|{next(iter(change))} (must be|is)"):
            data.restore({**state, **change})
    with pytest.raises(DataError, match="changed"):
        data_of("records", files, seed=1).restore(state)


def test_parts_for_replicas_go_through_epochs() -> None:
    data = from_arrays(Y, global_batch_size=10, seed=5)
    expected = [y.numpy() for epoch in (0, 1) for y in data.dataset(epoch=epoch)]
    # A batch of 3 rows for 4 replicas first.
    steps = list(OrderedBatches(data, moves=True).parts(0, 4, 4, Position(0, 5)).take(3))
    assert [[int(own) for own, _, _ in parts] for parts in steps] == [
        [0, 1, 1, 1],
        [2, 3, 2, 3],
        [2, 3, 2, 3],
    ]
    for parts, wanted in zip(steps, expected[5:], strict=False):
        rows = np.concatenate([rows.numpy()[: int(own)] for own, _, rows in parts])
        np.testing.assert_array_equal(rows, wanted)
        assert {int(size) for _, size, _ in parts} == {len(wanted)}
        assert all(len(rows) >= 1 for _, _, rows in parts)


def examples(order: Order, step: int | tf.Tensor, epoch: int = 0) -> np.ndarray:
    """The examples of a step's global batch."""
    seed = tf.constant([order.seed or 0, epoch], tf.int64)
    return order.rows(step, 0, order.size(step), seed).numpy()


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 3000), st.integers(1, 500), st.integers(0, 2**63 - 1), st.integers(0, 99))
@example(1024, 1024, 3, 0)
@example(1025, 1025, 3, 0)
@example(2**16 + 1, 2**16 + 1, 3, 0)
def test_an_epoch_has_every_example_once(n: int, batch: int, seed: int, epoch: int) -> None:
    batch = max(min(batch, n), n // 8 + 1)  # few steps: each is a call of TensorFlow
    order = Order(n, batch, seed)
    assert order.steps == (n + batch - 1) // batch
    steps = [examples(order, step, epoch) for step in range(order.steps)]
    np.testing.assert_array_equal(np.sort(np.concatenate(steps)), np.arange(n))


def test_the_order_is_written_down() -> None:
    """Positions in old checkpoints mean these orders; they must not change."""
    order = Order(8, 8, seed=42)
    np.testing.assert_array_equal(examples(order, 0), [2, 1, 4, 5, 6, 0, 3, 7])
    np.testing.assert_array_equal(examples(order, 0, epoch=1), [2, 5, 0, 1, 3, 7, 4, 6])
    order = Order(2000, 8, seed=42)
    np.testing.assert_array_equal(examples(order, 0), [903, 1154, 1741, 1957, 723, 1295, 1806, 578])
    later = [1727, 1544, 1242, 1784, 971, 1972, 1591, 105]
    np.testing.assert_array_equal(examples(order, 3, epoch=5), later)


def sigmas(a: np.ndarray, b: np.ndarray) -> float:
    """The correlation of two samples, in standard deviations of that of random ones."""
    return abs(np.corrcoef(a, b)[0, 1]) * np.sqrt(len(a))


@pytest.mark.parametrize("n", [1000, 10**12])
def test_the_order_looks_random(n: int) -> None:
    """With TensorFlow's own 4 rounds, these are 20 to 300 standard deviations."""
    sample = min(n, 100_000)
    orders = [examples(Order(n, sample, seed=7), 0, epoch) for epoch in range(4)]
    position = np.arange(sample)
    for order in orders:
        assert max(sigmas(order[:-lag], order[lag:]) for lag in (1, 2, 3, 8, 16, 64, 256)) < 5
        assert sigmas(order, position) < 5
        assert (order == position).sum() < 10  # one on average, for a whole permutation
    for one, other in [(0, 1), (1, 2), (0, 2), (0, 3)]:
        assert sigmas(orders[one], orders[other]) < 5
    assert len(set(map(bytes, orders))) == 4
    if n > sample:  # an even part of every region of the data
        counts = np.histogram(orders[0], 100, (0, n))[0]
        assert ((counts - 1000) ** 2 / 1000).sum() < 180  # 99 on average; over 180: 1 in a million


@pytest.mark.parametrize("number", [-1, 1.5])
def test_invalid_numbers_are_refused(number: Any) -> None:
    with pytest.raises(DataError, match="seed must be an integer from 0"):
        Order(10, 2, number)
    with pytest.raises(DataError, match="epoch must be an integer from 0"):
        from_arrays(Y, global_batch_size=10).dataset(epoch=number)
    with pytest.raises(DataError, match=r"number of examples .*got 0"):
        Order(0, 1)
    with pytest.raises(DataError, match="global_batch_size=11 is more than the 10 examples"):
        Order(10, 11)
