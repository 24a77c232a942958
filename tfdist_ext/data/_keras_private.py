"""The one place of `data/` where Keras's private names are used, each with the reason.

`tests/test_private_names.py` fails with the name and the reason when a release moves one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist_ext.data.pipelines import Specs, Structure, of_any_rows
from tfdist_ext.errors import TrainingError
from tfdist_ext.private_names import PrivateNames

_SLICING = "trainers.data_adapters.array_slicing"

NAMES = PrivateNames(
    "keras.src",
    TrainingError,
    {
        "trainers.data_adapters.array_data_adapter.ArrayDataAdapter": "arrays as data",
        "trainers.data_adapters.get_data_adapter": "all forms of data",
        f"{_SLICING}.TensorflowSparseWrapper": "sparse arrays as data",
        f"{_SLICING}.convert_to_sliceable": "arrays as data",
        f"{_SLICING}.slice_tensorflow_sparse_wrapper": "sparse arrays as data",
        f"{_SLICING}.train_validation_split": "validation_split",
    },
)


def train_validation_split(arrays: Structure, validation_split: float) -> Any:
    """(the first part of each array, the rest). Private: there is no public function."""
    split = NAMES(f"{_SLICING}.train_validation_split")
    return split(arrays, validation_split=validation_split)


def get_data_adapter(*data: Any, **options: Any) -> Any:
    """Keras's adapter of any data. Private: Keras's checks of data have no public name."""
    return NAMES("trainers.data_adapters.get_data_adapter")(*data, **options)


def array_parts(adapter: Any) -> tuple[Structure, int, int] | None:
    """Arrays as tensors, rows and global batch of an adapter; None if it holds no arrays.

    Private because the adapter's own dataset shuffles in an order of this process alone.
    """
    if not isinstance(adapter, NAMES("trainers.data_adapters.array_data_adapter.ArrayDataAdapter")):
        return None
    use = "arrays as data"
    inputs = NAMES.of(adapter, "_inputs", use)
    sliceable = NAMES(f"{_SLICING}.convert_to_sliceable")
    parts = sliceable(inputs, target_backend="tensorflow")
    parts = keras.tree.map_structure(
        lambda part: part if part is None or tf.is_tensor(part) else tf.convert_to_tensor(part),
        keras.tree.lists_to_tuples(parts),
    )
    rows, batch_size = NAMES.of(adapter, "_num_samples", use), NAMES.of(adapter, "_batch_size", use)
    return parts, rows, int(batch_size)  # it may be a NumPy integer


def one_pass(adapter: object) -> Iterator[Structure]:
    """The batches of one pass. Private: the public iterators convert to NumPy, or begin again."""
    return NAMES.of(adapter, "_get_iterator", "a PyDataset as data")()


def take(parts: Structure, indices: tf.Tensor) -> Structure:
    """The given rows of `parts`, dense or sparse. Private: how Keras slices sparse arrays."""

    def rows(part: Any) -> Any:
        if isinstance(part, NAMES(f"{_SLICING}.TensorflowSparseWrapper")):
            return NAMES(f"{_SLICING}.slice_tensorflow_sparse_wrapper")(part, indices)
        if isinstance(part, list | tuple | dict):
            return None  # a structure: look inside
        return tf.gather(part, indices) if tf.is_tensor(part) else part

    return keras.tree.traverse(rows, parts)


def specs_of_rows(parts: Structure) -> Specs:
    """The specs of what `take` returns, for an unknown number of rows."""

    def spec(part: Any) -> Any:
        if isinstance(part, NAMES(f"{_SLICING}.TensorflowSparseWrapper")):
            part = part.sparse
        elif not tf.is_tensor(part):
            return None  # a structure: look inside
        return of_any_rows(tf.type_spec_from_value(part))

    return keras.tree.traverse(spec, parts)
