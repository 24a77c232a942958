"""All kinds of data that Keras accepts, as global batches that every task splits the same way.

Every task of a cluster gets the data that one device would get. A global batch is split into one
contiguous part for each replica of the cluster, in replica order. A task reads only the parts of
its own replicas (`GlobalBatches`).

The data of `tfd.data` begins at its own position. If a function of the shard makes the data of
each task, the tasks agree in each step on whether there is a batch.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from tfdist_ext.data.function import FunctionDataset
from tfdist_ext.data.ordered import Order, OrderedDataset, sorted_at_random
from tfdist_ext.data.pipelines import in_parallel, takes_elements
from tfdist_ext.data.rows import (
    SHARED_TENSOR,
    batch_size_of,
    checked_batch_size,
    named_parts,
    rows_between,
)
from tfdist_ext.data.sharded import ShardedDataset
from tfdist_ext.data.shards import Shard, bounds
from tfdist_ext.errors import TrainingError
from tfdist_ext.training import _keras_private as kp
from tfdist_ext.training.agreement.equality import from_each_worker
from tfdist_ext.training.agreement.single_task import Reduction
from tfdist_ext.training.protocols import Specs, Structure

__all__ = [
    "GlobalBatches",
    "Part",
    "Parts",
    "batches_of_function",
    "batches_of_ordered",
    "check_says_nothing_else",
    "parts_of_dataset",
    "read",
]

# One replica's part of a global batch: the number of its rows, the number of rows of the global
# batch, and the rows. A part of 0 rows still holds one row; see `_spans`.
Part: TypeAlias = tuple[tf.Tensor, tf.Tensor, Structure]


# A global batch as a task gets it: a part for each of its replicas.
Parts: TypeAlias = tuple[Part, ...] | tf.distribute.DistributedValues


# (first replica, local replicas, all replicas) -> a dataset of `tuple[Part, ...]`.
PartsOf: TypeAlias = Callable[[int, int, int], tf.data.Dataset]


def read(
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    batch_size: int | None = None,
    steps: int | None = None,
    shuffle: bool | str = False,
    class_weight: dict[int, float] | None = None,
    seed: Callable[[], int] | None = None,
    replicas: int = 1,
) -> GlobalBatches:
    """Read what Keras accepts as data, as global batches.

    Args:
        x: a tf.data.Dataset must yield global batches.
        batch_size: examples in a global batch of arrays (default 32).
        steps: global batches in an epoch, if the caller asked for a number.
        shuffle: whether the examples of arrays, and the batches of a finite `PyDataset`, have a
            new order in each pass, the same on every task. "batch" shuffles within each batch.
        seed: returns the seed of the orders, for data to train on. Without it nothing is shuffled.
        replicas: number of replicas of all tasks. A single replica gets batches as they are.

    Raises:
        TrainingError: data that is distributed already, or not in batches.
        ValueError: what Keras itself refuses.
    """
    if isinstance(x, tf.distribute.DistributedDataset | tf.distribute.DistributedIterator):
        raise TrainingError(
            f"the data must not be distributed yet, got {type(x).__name__}. Pass the"
            " tf.data.Dataset of global batches; fit() splits it for the replicas."
        )
    if all(part is None for part in keras.tree.flatten(x)):
        raise TrainingError(f"x must have data, got {x!r}.")
    sizes = {"batch_size": batch_size, "steps_per_epoch": steps}
    # Keras does not shuffle: its random numbers differ between tasks.
    adapter = kp.get_data_adapter(x, y, sample_weight, class_weight=class_weight, **sizes)
    seed = seed if shuffle else None
    with tf.device("CPU:0"):
        found = kp.array_parts(adapter)
    if found is not None:
        return _batches_of_arrays(adapter, *found, shuffle, None if seed is None else seed())
    return _batches_of_dataset(x, adapter, class_weight, seed, replicas)


def _batches_of_dataset(
    x: Any,
    adapter: Any,
    class_weight: dict[int, float] | None,
    seed: Callable[[], int] | None,
    replicas: int,
) -> GlobalBatches:
    dataset = adapter.get_tf_dataset()
    _check_batches(dataset.element_spec, replicas)
    hooks = adapter
    if seed is not None and isinstance(x, keras.utils.PyDataset) and x.num_batches is not None:
        dataset = _in_new_orders(x, dataset.element_spec, class_weight, seed())
        hooks = x  # the adapter would start workers of its own, which read ahead
    is_infinite = dataset.cardinality() == tf.data.INFINITE_CARDINALITY
    return GlobalBatches(
        parts_of=parts_of_dataset(dataset),
        steps=adapter.num_batches,
        is_infinite=isinstance(x, tf.data.Dataset) and bool(is_infinite),
        dataset=dataset,
        on_epoch_begin=hooks.on_epoch_begin,
        on_epoch_end=hooks.on_epoch_end,
    )


def _batches_of_arrays(
    adapter: Any, arrays: Structure, rows: int, batch: int, shuffle: bool | str, seed: int | None
) -> GlobalBatches:
    @functools.cache  # a dataset needs the function that made it
    def dataset_fn(*replicas: int) -> tf.types.experimental.ConcreteFunction:
        function = _dataset_of_arrays(rows, batch, seed is not None and shuffle, *replicas)
        # Concrete: TensorFlow counts traces by other calls, and warns of many datasets.
        numbers = tf.TensorSpec([], tf.int64), tf.TensorSpec([], tf.int64)
        return function.get_concrete_function(*numbers, arrays)

    def parts_of(start: int, *replicas: int) -> tf.data.Dataset:
        with tf.device("CPU:0"):
            numbers = tf.constant(start, tf.int64), tf.constant(seed or 0, tf.int64)
            return dataset_fn(*replicas)(*numbers, arrays)

    return GlobalBatches(
        parts_of=functools.partial(parts_of, 0),
        from_step=lambda step: functools.partial(parts_of, step),
        steps=adapter.num_batches,
        batch_size=adapter.batch_size,
        is_infinite=True,
        arrays=arrays,
    )


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
            counts, low, high = _spans(size, first, local, replicas)
            begin, end = low[0], high[-1]  # spans follow each other: rows are asked once
            if shuffle == "batch":
                permutation = sorted_at_random(size, tf.stack([seed, number]))
                indices = step * batch + permutation[begin:end]
            else:
                of_pass = tf.stack([seed, number // steps])
                key = tf.random.stateless_uniform([3], of_pass, None, None, tf.uint32)
                indices = order.rows(step, begin, end, key)
            each = tf.gather(indices, tf.ragged.range(low - begin, high - begin).flat_values)
            taken = [kp.take(arrays, mine) for mine in tf.split(each, high - low, num=local)]
            return tuple(zip(tf.unstack(counts, local), [size] * local, taken, strict=True))

        options = tf.data.Options()  # nothing to optimize, which takes longer than a short fit
        options.experimental_optimization.apply_default_optimizations = False
        numbers = tf.data.Dataset.range(start, 2**62)
        as_it_is = tf.autograph.experimental.do_not_convert(parts)
        return in_parallel(numbers, as_it_is).with_options(options)

    return tf.function(dataset, autograph=False)


def parts_of_dataset(dataset: tf.data.Dataset, readers: int = 1) -> PartsOf:
    """The parts of a dataset of global batches.

    Args:
        readers: number of tasks that each read their own part of a global batch.
    """

    def parts_of(first: int, local: int, replicas: int) -> tf.data.Dataset:
        def parts(batch: Structure) -> tuple[Part, ...]:
            # Keras's generators put an empty Optional where a part of the batch is None.
            whole = keras.tree.map_structure(
                lambda part: None if isinstance(part, tf.experimental.Optional) else part, batch
            )
            if replicas * readers == 1:
                size = batch_size_of(whole)
                return ((size, size, whole),)
            size = checked_batch_size(whole, replicas * readers)
            spans = [tf.unstack(each, local) for each in _spans(size, first, local, replicas)]
            return tuple(
                (mine, size, rows_between(whole, low, high))
                for mine, low, high in zip(*spans, strict=True)
            )

        return in_parallel(dataset, takes_elements(dataset, parts))

    return parts_of


def _spans(
    rows: tf.Tensor, first: int, local: int, replicas: int
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """For each local replica: rows of its part, first row, row after the last one to read.

    A part of 0 rows, of a batch with fewer rows than replicas, still reads one row: many operations
    fail, or return NaN, on no rows.
    """
    low, high = bounds(rows, tf.range(first, first + local, dtype=tf.int64), replicas)
    return high - low, low, tf.maximum(high, low + 1)


def _check_batches(spec: Specs, replicas: int) -> None:
    """
    Raises:
        TrainingError: no input, or tensors without a row for each example, as far as shapes tell.
    """
    parts = dict(named_parts(keras.utils.unpack_x_y_sample_weight(spec)))
    if not any(name.startswith("x") for name in parts):
        raise TrainingError(
            "each batch must begin with the model's input, got None: let the data yield x, (x, y)"
            " or (x, y, sample_weight)."
        )
    shapes = {name: part.shape for name, part in parts.items() if part.shape.rank is not None}
    # On one replica all examples may share an input.
    split = [
        shape
        for name, shape in shapes.items()
        if replicas > 1 or name in ("x", "y", "sample_weight")
    ]
    rows = {shape[0] if shape.rank else 0 for shape in split} - {None}
    if 0 in rows or (replicas > 1 and len(rows) > 1):
        each = ", ".join(f"{name} of shape {list(shape)}" for name, shape in shapes.items())
        raise TrainingError(
            f"the dataset must yield batches with one row for each example, got {each}. Call"
            f" .batch(n) on it, n being the examples of a global batch. {SHARED_TENSOR}"
        )


@dataclass(kw_only=True)
class GlobalBatches:
    """Passes over a sequence of global batches, split for the replicas of this task.

    If `needs_row_count` is set, a part has 1 in place of the number of rows of its global batch, or
    0 if the data of this task has ended. The pass is over when all parts have 0.

    Attributes:
        parts_of: makes the parts of some replicas.
        from_step: the same, beginning with a later global batch; None if batches cannot be skipped.
        steps: global batches in a pass; None if only reading tells.
        batch_size: examples in a global batch; None if only reading tells.
        is_infinite: the dataset starts the next pass by itself, so that no step has to ask whether
            the data has ended. Under several workers each such question is a collective.
        begin: returns the global batch of a pass that the first pass begins with, from the data's
            own position.
        needs_row_count: the tasks have to sum the rows of their parts of each global batch.
        dataset: a dataset of one pass of whole global batches, if each task reads all of them.
        arrays: all of the data, if each task has it in memory.
        advance: called with the number of global batches that were used.
        ended: called when a pass is over.
    """

    parts_of: PartsOf
    from_step: Callable[[int], PartsOf] | None = None
    steps: int | None = None
    batch_size: int | None = None
    is_infinite: bool = False
    begin: Callable[[], int] = lambda: 0
    needs_row_count: bool = False
    dataset: tf.data.Dataset | None = None
    arrays: Structure = None
    on_epoch_begin: Callable[[], None] = lambda: None
    on_epoch_end: Callable[[], None] = lambda: None
    advance: Callable[[int], None] = lambda steps: None
    ended: Callable[[], None] = lambda: None

    @property
    def element_spec(self) -> Specs:
        """The structure of one global batch of `tf.TypeSpec`s, batch dimension unknown."""
        spec = self.parts_of(0, 1, 1).element_spec[0][2]
        # A part that the data leaves out (y, weights) is None, and has no spec with a shape.
        return keras.tree.map_structure(lambda s: s if hasattr(s, "shape") else None, spec)

    def distributed(self, strategy: tf.distribute.Strategy) -> tf.distribute.DistributedDataset:
        """A distributed dataset: each element holds one part for each local replica."""

        def pipeline(context: tf.distribute.InputContext | None) -> tf.data.Dataset:
            context = context or tf.distribute.InputContext()
            replicas = context.num_replicas_in_sync
            local = replicas // context.num_input_pipelines
            parts = self.parts_of(context.input_pipeline_id * local, local, replicas)
            return parts.flat_map(_one_by_one).prefetch(tf.data.AUTOTUNE)

        return strategy.distribute_datasets_from_function(pipeline)

    def on_host(self, first: int, local: int, replicas: int) -> tf.data.Dataset:
        """A plain dataset: each element is the tuple of this task's replicas' parts.

        For replicas on CPUs, where TensorFlow's distributed iterator costs more than a small step.
        """
        return self.parts_of(first, local, replicas).prefetch(tf.data.AUTOTUNE)


def _one_by_one(*parts: Part) -> tf.data.Dataset:
    each = map(tf.data.Dataset.from_tensors, parts)
    return functools.reduce(tf.data.Dataset.concatenate, each)


def _in_new_orders(
    source: keras.utils.PyDataset, spec: Specs, class_weight: dict[int, float] | None, seed: int
) -> tf.data.Dataset:
    """The batches of a finite PyDataset; each iterator reads the next pass, in its own order.

    Its `workers`, `use_multiprocessing` and `max_queue_size` have their usual meaning.

    Args:
        spec: tf.TypeSpecs of a batch, batch dimension unknown.
        seed: determines the orders, the same on every task.
    """
    numbers = itertools.count()

    def next_pass() -> Iterator[Structure]:
        random = np.random.default_rng([seed, next(numbers)])
        order = random.permutation(source.num_batches).tolist()
        adapter = kp.get_data_adapter(_Permuted(source, order), class_weight=class_weight)
        try:
            yield from kp.batches_of(adapter)
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


def batches_of_ordered(data: OrderedDataset) -> GlobalBatches:
    """The global batches, beginning at the data's position.

    Raises:
        TrainingError: a position between two batches.
    """

    def begin() -> int:
        epoch, examples = data.position
        if examples % data.global_batch_size:
            raise TrainingError(
                "the position of the data must be between two global batches of"
                f" {data.global_batch_size}, got {examples} examples of an epoch. Resume with the"
                " global batch size of the earlier training."
            )
        return epoch * data.steps + data.steps_done

    def parts_of(first: int, local: int, replicas: int) -> tf.data.Dataset:
        return data.parts(first, local, replicas, begin(), counted=not data.loses_examples)

    return GlobalBatches(
        parts_of=parts_of,
        steps=data.steps,
        batch_size=data.global_batch_size,
        is_infinite=True,
        begin=lambda: begin() % data.steps,
        needs_row_count=data.loses_examples,
        advance=data.advance,
    )


def check_says_nothing_else(data: ShardedDataset, **given: Any) -> None:
    """
    Raises:
        TrainingError: an argument of `fit` that a ShardedDataset already determines.
    """
    if given["batch_size"] == data.global_batch_size:
        del given["batch_size"]
    extra = [name for name, value in given.items() if value is not None]
    if extra:
        raise TrainingError(
            f"{' and '.join(extra)} must be left out with a ShardedDataset, which determines them:"
            " from_arrays((x, y, sample_weight), global_batch_size=64)."
        )


def batches_of_function(
    data: FunctionDataset, reduction: Reduction, *, from_position: bool
) -> GlobalBatches:
    """This task's batches, from the data's position or of epoch 0; every worker must call."""
    shard = Shard(reduction.worker, reduction.workers)

    def parts_of(first: int, local: int, replicas: int) -> tf.data.Dataset:
        dataset = data.dataset(shard) if from_position else data.whole_epoch(shard)
        if shard.count == 1:
            return parts_of_dataset(dataset)(first, local, replicas)
        return _then_nothing(dataset, local, shard.count)

    epoch = data.position[0] if from_position else 0
    steps, is_infinite = _agreed_length(data.whole_epoch(shard, epoch), reduction)
    if data.takes_epoch and from_position:  # other epochs may have more batches, or fewer
        steps = None
    return GlobalBatches(
        parts_of=parts_of,
        steps=steps,
        batch_size=data.global_batch_size,
        is_infinite=is_infinite,
        begin=lambda: data.steps_done if from_position else 0,
        needs_row_count=shard.count > 1,
        advance=data.advance if from_position else lambda steps: None,
        ended=data.end_epoch if from_position else lambda: None,
    )


def _agreed_length(dataset: tf.data.Dataset, reduction: Reduction) -> tuple[int | None, bool]:
    """(steps of an epoch on the worker with most steps, whether one worker has endless data)."""
    lengths = from_each_worker(reduction, dataset.cardinality().numpy())
    if (lengths == tf.data.INFINITE_CARDINALITY).any():
        return None, True
    return None if lengths.min() < 0 else int(lengths.max()), False


def _then_nothing(dataset: tf.data.Dataset, local: int, readers: int) -> tf.data.Dataset:
    """Parts for the local replicas, followed by an endless sequence of parts without rows.

    The tasks agree in each step on whether a task has rows; see `GlobalBatches`.
    """

    def marked(batches: tf.data.Dataset, is_real: int) -> tf.data.Dataset:
        def of_parts(*parts: Part) -> tuple[Part, ...]:
            flag = tf.constant(is_real, tf.int64)
            return tuple((rows * flag, flag, batch) for rows, _, batch in parts)

        return parts_of_dataset(batches, readers)(0, local, local).map(of_parts)

    one_row = tf.nest.map_structure(_one_row, dataset.element_spec)
    nothing = marked(tf.data.Dataset.from_tensors(one_row), 0)
    return marked(dataset, 1).concatenate(nothing.repeat())


def _one_row(spec: tf.TypeSpec) -> tf.Tensor:
    """A batch of one row of zeros, for a replica without rows."""
    if isinstance(spec, tf.RaggedTensorSpec):
        inner = [size or 0 for size in spec.shape[spec.ragged_rank + 1 :]]
        splits = [tf.zeros([2], spec.row_splits_dtype)]
        splits += [tf.zeros([1], spec.row_splits_dtype)] * (spec.ragged_rank - 1)
        return tf.RaggedTensor.from_nested_row_splits(tf.zeros([0, *inner], spec.dtype), splits)
    rest = [size or 1 for size in spec.shape[1:]]
    if isinstance(spec, tf.SparseTensorSpec):
        indices = tf.zeros([0, 1 + len(rest)], tf.int64)
        return tf.SparseTensor(indices, tf.zeros([0], spec.dtype), [1, *rest])
    return tf.zeros([1, *rest], spec.dtype)
