"""Arrays, custom sources, and fingerprints that notice other data."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tfdist_ext.data import DataError, Shard, from_arrays, from_source
from tfdist_ext.data.sources import Arrays, difference

ROWS = 53
X = np.arange(ROWS * 3, dtype="float32").reshape(ROWS, 3)
Y = np.arange(ROWS)


def test_arrays_of_the_other_byte_order_are_read(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", X.astype(">f4"))
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    for array in (mapped, X.astype(">f4")):
        (batch,) = from_arrays(array, global_batch_size=ROWS).dataset()
        np.testing.assert_array_equal(batch, X)


class Squares:
    element_spec = tf.TensorSpec([None], tf.int64)

    def __len__(self) -> int:
        return 20

    def take(self, indices: tf.Tensor) -> tf.Tensor:
        return indices * indices

    def fingerprint(self) -> dict[str, Any]:
        return {"kind": "squares"}


def test_a_custom_source_is_read_in_order() -> None:
    data = from_source(Squares(), global_batch_size=6)
    assert next(iter(data.dataset(Shard(1, 2)))).numpy().tolist() == [9, 16, 25]
    with pytest.raises(
        DataError, match=r"is not a source of examples: it has no element_spec, take"
    ):
        from_source([1, 2], global_batch_size=1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ((X, Y[:-1]), "0 has 53, 1 has 52"),
        ((), "arrays is an empty structure"),
        (Y.astype("M8[s]"), r"array must have a dtype that tensors have, got datetime64"),
        (3.0, "single value"),
        (np.array([{}, None]), "dtype that tensors have, got object"),
    ],
)
def test_wrong_arrays_are_refused(arrays: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        from_arrays(arrays, global_batch_size=4)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        pytest.param({"x": np.asfortranarray(X), "y": Y.copy()}, "^$", id="another layout"),
        pytest.param({"x": X[:3], "y": Y[:3]}, r"x: shape \[53, 3\] -> \[3, 3\]", id="fewer"),
        pytest.param({"x": X.astype("f8"), "y": Y}, "x: dtype <f4 -> <f8", id="dtype"),
        pytest.param({"x": X, "y": Y[::-1]}, r"^y: content \w+ -> \w+$", id="values"),
        pytest.param({"x": X, "y": Y, "w": Y}, r"w: shape none -> \[53\]", id="one more"),
    ],
)
def test_a_fingerprint_of_arrays_changes_with_them(arrays: Any, message: str) -> None:
    known = Arrays({"x": X, "y": Y}).fingerprint()
    assert re.search(message, difference(known, Arrays(arrays).fingerprint()))


def test_a_fingerprint_samples_large_arrays(tmp_path: Path) -> None:
    array = np.random.default_rng(0).integers(0, 255, (3000, 1001), dtype=np.uint8)
    np.save(tmp_path / "a.npy", array)
    known = Arrays(array).fingerprint()
    assert Arrays(np.load(tmp_path / "a.npy", mmap_mode="r")).fingerprint() == known
    for rows in (slice(0, 1), slice(-1, None), slice(1000, 1004)):
        changed = array.copy()
        changed[rows] += 1
        assert Arrays(changed).fingerprint() != known
