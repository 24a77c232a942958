"""Sources that look batches up in Python: the same order, whatever they need to be asked like."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tfdist_ext.data import DataError, Shard, from_arrays, from_source

ROWS = 40
X = np.arange(ROWS * 3, dtype="float32").reshape(ROWS, 3)


class Rising:
    """As h5py: numbers must rise, none of them twice."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, numbers: np.ndarray) -> Any:
        assert (np.diff(numbers) > 0).all()
        return X[numbers], numbers.astype("int32")


class Columns(Rising):
    """As Hugging Face: lists by name."""

    def __getitem__(self, numbers: Any) -> Any:
        return {"row": X[numbers].tolist(), "text": [f"no. {n}" for n in numbers]}


def test_the_order_is_that_of_arrays() -> None:
    settings: dict[str, Any] = {"global_batch_size": 12, "seed": 5}
    data = from_source(Rising(), **settings)
    expected = from_arrays((X, np.arange(ROWS, dtype="int32")), **settings)
    assert data.element_spec == expected.element_spec
    for shard in (Shard(0, 1), Shard(2, 3)):
        for found, wanted in zip(data.dataset(shard), expected.dataset(shard), strict=True):
            np.testing.assert_array_equal(found[0], wanted[0])
            np.testing.assert_array_equal(found[1], wanted[1])
    last = list(data.dataset(Shard(0, 9)))[-1]  # of 4 examples, none
    assert last[0].shape == (0, 3)


def test_columns_of_lists() -> None:
    data = from_source(Columns(), global_batch_size=ROWS, seed=1)
    (batch,) = data.dataset()
    numbers = [int(text.decode().split()[1]) for text in batch["text"].numpy()]
    assert sorted(numbers) == list(range(ROWS)) != numbers
    np.testing.assert_array_equal(batch["row"], X[numbers])


def test_text_as_objects_and_the_other_byte_order() -> None:
    class Text(Rising):
        def __getitem__(self, numbers: Any) -> Any:
            text = np.array([b"no. %d" % n for n in numbers], object)
            return text, X[numbers].astype(">f4")

    data = from_source(Text(), global_batch_size=ROWS)
    ((text, x),) = data.dataset()
    assert text.numpy()[13] == b"no. 13"
    np.testing.assert_array_equal(x, X)
    data.restore(data.state())


def test_what_the_source_raises_is_a_data_error() -> None:
    class Breaks(Rising):
        def __getitem__(self, numbers: Any) -> Any:
            if numbers.max() > 20:
                raise OSError("disk is gone")
            return X[numbers]

    with pytest.raises(
        DataError,
        match="got OSError from the source: disk is gone",
    ):
        list(from_source(Breaks(), global_batch_size=4).dataset())


def test_a_position_is_of_this_source() -> None:
    class Longer(Rising):
        def __len__(self) -> int:
            return ROWS + 1

    state = from_source(Rising(), global_batch_size=12, seed=5).state()
    from_source(Rising(), global_batch_size=12, seed=5).restore(state)
    with pytest.raises(DataError, match=f"examples {ROWS} -> {ROWS + 1}"):
        from_source(Longer(), global_batch_size=12, seed=5).restore(state)


def broken(length: int, answer: Any) -> Any:
    class Broken:
        def __len__(self) -> int:
            return length

        def __getitem__(self, numbers: Any) -> Any:
            if isinstance(answer, Exception):
                raise answer
            return answer

    return Broken()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (iter([1]), r"must have len\(source\) and source\[numbers\]"),
        (broken(0, X), "source must have at least 1 example, got 0; check what it reads"),
        (
            broken(3, KeyError("row")),
            r"source\[numbers\] must take an int64 array of .*got KeyError from the source: 'row'",
        ),
        (
            broken(3, X[:2]),
            r"source\[numbers\] must give arrays with a row .*got shape \(2, 3\) and dtype",
        ),
        (broken(3, np.array([{}])), "dtype object"),
    ],
)
def test_what_is_no_source(source: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        from_source(source, global_batch_size=1)


def test_another_kind_of_numbers_is_not_cut_off() -> None:
    class Sometimes(Rising):
        def __getitem__(self, numbers: Any) -> Any:
            return numbers + 0.5 if numbers.max() > 20 else numbers

    source: Any = from_source(Sometimes(), global_batch_size=4).source
    with pytest.raises(
        DataError,
        match=r"source\[numbers\] must always give one dtype, got float64 after int64 for the",
    ):
        source._rows(np.array([30]))


def test_too_few_rows_are_said() -> None:
    source: Any = from_source(Rising(), global_batch_size=4).source
    source._source = broken(ROWS, (X[:1], X[:1, 0]))
    with pytest.raises(
        DataError, match=r"source\[numbers\] must give a row for each .*got 1 rows for \[2 5"
    ):
        source._rows(np.array([5, 2, 7]))


def test_a_real_hdf5_file(tmp_path: Path) -> None:
    import h5py

    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["x"] = X
        data = from_source(file["x"], global_batch_size=12, seed=5)
        for found, wanted in zip(
            data.dataset(), from_arrays(X, global_batch_size=12, seed=5).dataset(), strict=True
        ):
            np.testing.assert_array_equal(found, wanted)
