"""Global batches of what Keras accepts: arrays, a tf.data.Dataset, a PyDataset, a generator.

Each task takes its rows of arrays by their numbers. Of other data, each task reads whole global
batches, and keeps the parts of its own replicas.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist_ext.data._keras_private import get_data_adapter, one_pass, specs_of_rows, take
from tfdist_ext.data.batches import Batches, Feed, Inspect, Iterators, Position, PositionedBatches
from tfdist_ext.data.ordered import Order, sorted_at_random
from tfdist_ext.data.pipelines import (
    SHARED_TENSOR,
    Part,
    Specs,
    Structure,
    in_parallel,
    named_parts,
    parts_of_dataset,
    rest_of,
    without_prefetch,
)
from tfdist_ext.data.shards import bounds
from tfdist_ext.errors import TrainingError


class ArrayBatches(PositionedBatches):
    """Rows of arrays, pass after pass, in a new order in each pass if they are shuffled.

    Args:
        arrays: tensors, dense or sparse.
        rows: number of rows.
        batch_size: rows of a global batch.
        shuffle: "batch" shuffles within each batch.
        seed: of the orders, the same on every task; None: a single pass, in the order of the rows.
    """

    def __init__(
        self, arrays: Structure, rows: int, batch_size: int, shuffle: bool | str, seed: int | None
    ):
        steps, spec = -(-rows // batch_size), specs_of_rows(arrays)
        super().__init__(spec, steps=steps, batch_size=batch_size, is_infinite=seed is not None)
        self.arrays = arrays
        self.examples = rows
        self._seed = seed or 0
        self._shuffle = seed is not None and shuffle

    def parts(self, first: int, local: int, replicas: int, start: Position) -> tf.data.Dataset:
        sizes = self.examples, self.batch_size, self._shuffle
        with tf.device("CPU:0"):
            span = self.span(start)
            numbers = [tf.constant(number, tf.int64) for number in (*span, self._seed)]
            function = _dataset_of_arrays(*sizes, first, local, replicas)
            # Concrete: TensorFlow counts traces by other calls, and warns of many datasets.
            specs = [tf.TensorSpec([], tf.int64)] * len(numbers)
            # A dataset needs the function that made it.
            self._function = function.get_concrete_function(*specs, self.arrays)
            return self._function(*numbers, self.arrays)


@functools.lru_cache(maxsize=16)  # a fit on data like that of the last one traces nothing
def _dataset_of_arrays(
    rows: int, batch: int, shuffle: bool | str, first: int, local: int, replicas: int
) -> tf.types.experimental.PolymorphicFunction:
    """Returns a function from (start, stop, seed, arrays) to the parts of global batches."""
    steps = max(1, -(-rows // batch))
    # `Epochs` refuses arrays without rows or steps.
    order = Order(max(rows, 1), max(1, min(batch, rows)), 0 if shuffle is True else None)

    def dataset(
        start: tf.Tensor, stop: tf.Tensor, seed: tf.Tensor, arrays: Structure
    ) -> tf.data.Dataset:
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
                indices = order.rows(step, begin, end, tf.stack([seed, number // steps]))
            spans = tf.gather(indices, tf.ragged.range(low - begin, high - begin).flat_values)
            taken = [take(arrays, span) for span in tf.split(spans, high - low, num=local)]
            return tuple(zip(tf.unstack(counts, local), [size] * local, taken, strict=True))

        options = tf.data.Options()  # nothing to optimize, which takes longer than a short fit
        options.experimental_optimization.apply_default_optimizations = False
        numbers = tf.data.Dataset.range(start, stop)
        as_it_is = tf.autograph.experimental.do_not_convert(parts)
        return in_parallel(numbers, as_it_is).with_options(options)

    return tf.function(dataset, autograph=False)


class DatasetBatches(Batches):
    """The batches of a tf.data.Dataset, which are global batches.

    Args:
        steps: batches of the dataset; None if only reading tells.
        replicas: number of replicas of all tasks. A single replica gets batches as they are.

    Attributes:
        dataset: a dataset of one pass.

    Raises:
        TrainingError: the batches have no input, or tensors without rows.
    """

    is_read_by_all = True

    def __init__(self, dataset: tf.data.Dataset, steps: int | None, replicas: int):
        super().__init__(
            dataset.element_spec,
            steps=steps,
            batch_size=_batch_size_of(dataset),
            is_infinite=bool(dataset.cardinality() == tf.data.INFINITE_CARDINALITY),
        )
        _check_batches(self.element_spec, replicas)
        self.dataset = dataset

    @property
    def settings(self) -> dict[str, Any]:
        # TensorFlow may know the batch size of one worker's dataset and not of another's.
        return {**super().settings, "batch_size": None}

    def iterators(self, feed: Feed, *, in_pieces: bool, inspect: Inspect) -> Iterators:
        return KerasIterators(self, feed, in_pieces=in_pieces, inspect=inspect)


class KerasBatches(DatasetBatches):
    """The batches of a PyDataset, of a generator, or of what else Keras accepts.

    Args:
        x: the data that the user gave.
        adapter: Keras's adapter of the data.
        seed: of the orders of a finite PyDataset, the same on every task; None: its own order.
    """

    def __init__(
        self,
        x: Any,
        adapter: Any,
        replicas: int,
        class_weight: dict[int, float] | None,
        seed: Callable[[], int] | None,
    ):
        super().__init__(adapter.get_tf_dataset(), adapter.num_batches, replicas)
        self._hooks = adapter
        if seed is not None and isinstance(x, keras.utils.PyDataset) and x.num_batches is not None:
            spec = self.dataset.element_spec
            self.dataset = _in_new_orders(x, spec, class_weight, seed())
            self._hooks = x  # the adapter would start workers of its own, which read ahead
        self.is_infinite = False
        self.reads_once = isinstance(x, Iterator)

    def on_epoch_begin(self) -> None:
        self._hooks.on_epoch_begin()

    def on_epoch_end(self) -> None:
        self._hooks.on_epoch_end()


class KerasIterators(Iterators):
    """Makes iterators over a dataset exactly when Keras's EpochIterator makes them.

    A seeded `shuffle` draws a new order whenever an iterator over it is made.

    Without a number of steps, each epoch has an iterator of its own. With a number of steps, the
    epochs share an iterator until a pass has ended. In both cases, if Keras knows the length of a
    pass, it makes an iterator at the end of the pass.

    Reading ahead stops at the end of an epoch. Reading ahead into another repetition of the data
    would make iterators at unknown times.

    Args:
        in_pieces, inspect: see `Batches.iterators`.
    """

    def __init__(self, batches: DatasetBatches, feed: Feed, *, in_pieces: bool, inspect: Inspect):
        whole_pass = functools.cache(lambda: feed(parts_of_dataset(batches.dataset)))
        super().__init__(lambda start: iter(whole_pass()), continues=False)
        self._feed = feed
        self._dataset = batches.dataset
        self._in_pieces = in_pieces
        self._inspect = inspect
        self._source: tf.data.Iterator | None = None  # of the running pass
        self._inputs: dict[int | None, Any] = {}  # what reads on from the source, by its steps

    def of_epoch(self, steps: int | None, start: Position) -> Any:
        if self._inspect is None and not self._in_pieces:
            return self._create(start)
        if self._source is None or not self._in_pieces:
            self.pass_ended()
        if self._inspect is not None:
            self._source = _inspected(self._source, self._inspect)
            self._inspect = None
        if steps not in self._inputs:
            self._inputs[steps] = self._feed(parts_of_dataset(rest_of(self._source, steps)))
        return iter(self._inputs[steps])  # iterating over the same input again reads on

    def pass_ended(self) -> None:
        self._source, self._inputs = without_prefetch(self._dataset), {}

    def forget(self) -> None:
        self._source = None


def _inspected(source: tf.data.Iterator, inspect: Callable[[Structure], None]) -> tf.data.Iterator:
    """Calls a function with the first batch of a source; returns an iterator over all batches."""
    first = next(source, None)
    inspect(first)
    if first is None:
        return source
    rest = rest_of(source, None)
    return without_prefetch(tf.data.Dataset.from_tensors(first).concatenate(rest))


def _batch_size_of(dataset: tf.data.Dataset) -> int | None:
    """The rows of the batches that a dataset makes; None if only reading tells."""
    variant = tf.data.experimental.to_variant(dataset)
    size = int(tf.raw_ops.ComputeBatchSize(input_dataset=variant))
    return size if size > 0 else None


def _check_batches(spec: Specs, replicas: int) -> None:
    """Check the structure of the batches of a dataset. `checked_batch_size` compares rows."""
    parts = dict(named_parts(keras.utils.unpack_x_y_sample_weight(spec)))
    if not any(name.startswith("x") for name in parts):
        raise TrainingError(
            "The first element of each batch is None. Batches must be x, (x, y) or (x, y,"
            " sample_weight)."
        )
    shapes = {name: part.shape for name, part in parts.items() if part.shape.rank is not None}
    # On one replica all examples may share an input.
    split = shapes if replicas > 1 else shapes.keys() & {"x", "y", "sample_weight"}
    if any(shapes[name].rank == 0 or shapes[name][0] == 0 for name in split):
        listed = ", ".join(f"{name} of shape {list(shape)}" for name, shape in shapes.items())
        raise TrainingError(
            f"A batch of the dataset does not have one row for each example: it has {listed}. Call"
            f" .batch(global_batch_size) on the dataset. {SHARED_TENSOR}"
        )


def _in_new_orders(
    source: keras.utils.PyDataset, spec: Specs, class_weight: dict[int, float] | None, seed: int
) -> tf.data.Dataset:
    """The batches of a finite PyDataset; each iterator reads the next pass.

    Its `workers`, `use_multiprocessing` and `max_queue_size` have their usual meaning.

    Args:
        spec: tf.TypeSpecs of a batch, batch dimension unknown.
        seed: determines the orders, the same on every task.
    """
    numbers = itertools.count()

    def next_pass() -> Iterator[Structure]:
        random = np.random.default_rng([seed, next(numbers)])
        order = random.permutation(source.num_batches).tolist()
        adapter = get_data_adapter(_Permuted(source, order), class_weight=class_weight)
        try:
            yield from one_pass(adapter)
        finally:
            adapter.on_epoch_end()  # stops workers that read ahead

    return tf.data.Dataset.from_generator(next_pass, output_signature=spec)


class _Permuted(keras.utils.PyDataset):
    """Another order of the batches of `source`; the hooks of epochs are not passed on."""

    def __init__(self, source: keras.utils.PyDataset, order: Sequence[int]):
        super().__init__(
            workers=source.workers,
            use_multiprocessing=source.use_multiprocessing,
            max_queue_size=source.max_queue_size,
        )
        self._source = source
        self._order = order

    @property
    def num_batches(self) -> int:
        return len(self._order)

    def __getitem__(self, index: int) -> Structure:
        return self._source[self._order[index]]
