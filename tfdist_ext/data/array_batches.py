"""Arrays as global batches: each task takes its rows of each batch by their numbers."""

from __future__ import annotations

import functools
from typing import Any

import keras
import tensorflow as tf

from tfdist_ext.data._keras_private import take
from tfdist_ext.data.batches import Batches
from tfdist_ext.data.ordered import Order, sorted_at_random
from tfdist_ext.data.pipelines import Part, Specs, Structure, in_parallel
from tfdist_ext.data.shards import bounds


class ArrayBatches(Batches):
    """Rows of arrays, pass after pass, in a new order in each pass if they are shuffled.

    Args:
        arrays: tensors, dense or sparse.
        rows: number of rows.
        batch_size: rows of a global batch.
        shuffle: "batch" shuffles within each batch.
        seed: of the orders, the same on every task; None: the order of the rows.
    """

    can_begin_anywhere = True

    def __init__(
        self, arrays: Structure, rows: int, batch_size: int, shuffle: bool | str, seed: int | None
    ):
        steps = -(-rows // batch_size)
        super().__init__(_specs_of(arrays), steps=steps, batch_size=batch_size, is_infinite=True)
        self.arrays = arrays
        self.examples = rows
        self._seed = seed or 0
        self._shuffle = seed is not None and shuffle
        self._functions = functools.cache(self._function)  # a dataset needs what made it

    def parts(self, first: int, local: int, replicas: int, start: int) -> tf.data.Dataset:
        with tf.device("CPU:0"):
            numbers = tf.constant(start, tf.int64), tf.constant(self._seed, tf.int64)
            return self._functions(first, local, replicas)(*numbers, self.arrays)

    def _function(self, *replicas: int) -> tf.types.experimental.ConcreteFunction:
        function = _dataset_of_arrays(self.examples, self.batch_size, self._shuffle, *replicas)
        # Concrete: TensorFlow counts traces by other calls, and warns of many datasets.
        numbers = tf.TensorSpec([], tf.int64), tf.TensorSpec([], tf.int64)
        return function.get_concrete_function(*numbers, self.arrays)


def _specs_of(arrays: Structure) -> Specs:
    """The specs of a batch of the arrays' rows."""

    def spec(array: Any) -> tf.TypeSpec | None:
        if array is None:
            return None
        of_array = tf.type_spec_from_value(array)
        return type(of_array)([None, *of_array.shape[1:]], of_array.dtype)

    return keras.tree.map_structure(spec, arrays)


@functools.lru_cache(maxsize=16)  # a fit on data like that of the last one traces nothing
def _dataset_of_arrays(
    rows: int, batch: int, shuffle: bool | str, first: int, local: int, replicas: int
) -> tf.types.experimental.PolymorphicFunction:
    """Returns a function from (first global batch, seed, arrays) to the local replicas' parts."""
    steps = max(1, -(-rows // batch))
    # `Epochs` refuses arrays without rows or steps.
    order = Order(max(rows, 1), max(1, min(batch, rows)), 0 if shuffle is True else None)

    def dataset(start: tf.Tensor, seed: tf.Tensor, arrays: Structure) -> tf.data.Dataset:
        def parts(number: tf.Tensor) -> tuple[Part, ...]:
            step = number % steps
            size = tf.minimum(rows - step * batch, batch)
            replica = tf.range(first, first + local, dtype=tf.int64)
            low, stop = map(tf.convert_to_tensor, bounds(size, replica, replicas))
            counts, high = stop - low, tf.maximum(stop, low + 1)
            begin, end = low[0], high[-1]  # spans follow each other: rows are asked once
            if shuffle == "batch":
                permutation = sorted_at_random(size, tf.stack([seed, number]))
                indices = step * batch + permutation[begin:end]
            else:
                of_pass = tf.stack([seed, number // steps])
                key = tf.random.stateless_uniform([3], of_pass, None, None, tf.uint32)
                indices = order.rows(step, begin, end, key)
            spans = tf.gather(indices, tf.ragged.range(low - begin, high - begin).flat_values)
            taken = [take(arrays, span) for span in tf.split(spans, high - low, num=local)]
            return tuple(zip(tf.unstack(counts, local), [size] * local, taken, strict=True))

        options = tf.data.Options()  # nothing to optimize, which takes longer than a short fit
        options.experimental_optimization.apply_default_optimizations = False
        numbers = tf.data.Dataset.range(start, 2**62)
        as_it_is = tf.autograph.experimental.do_not_convert(parts)
        return in_parallel(numbers, as_it_is).with_options(options)

    return tf.function(dataset, autograph=False)
