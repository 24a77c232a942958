"""All kinds of data that Keras accepts: as global batches, split for replicas, in epochs.

Every task of a cluster gets the data that one device would get. A global batch is split into one
contiguous part for each replica of the cluster, in replica order. A task reads only the parts of
its own replicas (`GlobalBatches`).

Epochs follow the rules of Keras's EpochIterator. A seeded `shuffle` draws a new order whenever an
iterator over it is made, so `Epochs` makes iterators over a dataset exactly when Keras makes them.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from tfdist_ext.data._keras_private import array_parts, get_data_adapter, one_pass, take
from tfdist_ext.data.ordered import Order, sorted_at_random
from tfdist_ext.data.pipelines import (
    SHARED_TENSOR,
    Part,
    PartsOf,
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
from tfdist_ext.training.steps.scope import Logs
from tfdist_ext.user_frames import warn

EMPTY = "The dataset is empty: it produced no batch. Check its filters and steps."

# An iterator over what an engine feeds: for each global batch, this task's parts of it.
BatchIterator: TypeAlias = tf.data.Iterator | tf.distribute.DistributedIterator


# A global batch as a task gets it: a part for each of its replicas.
Parts: TypeAlias = tuple[Part, ...] | tf.distribute.DistributedValues


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
            f"The data is distributed already: it is a {type(x).__name__}. Pass the tf.data.Dataset"
            " of global batches. `fit` splits it for the replicas."
        )
    if all(part is None for part in keras.tree.flatten(x)):
        raise TrainingError(f"There is no data: x is {x!r}.")
    sizes = {"batch_size": batch_size, "steps_per_epoch": steps}
    # Keras does not shuffle: its random numbers differ between tasks.
    adapter = get_data_adapter(x, y, sample_weight, class_weight=class_weight, **sizes)
    shuffle = "batch" if shuffle == "batch" else bool(shuffle)
    seed = seed if shuffle else None
    with tf.device("CPU:0"):
        found = array_parts(adapter)
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
        batch_size=_batch_size_of(dataset),
        is_infinite=isinstance(x, tf.data.Dataset) and bool(is_infinite),
        reads_once=isinstance(x, Iterator),
        dataset=dataset,
        on_epoch_begin=hooks.on_epoch_begin,
        on_epoch_end=hooks.on_epoch_end,
    )


def _batch_size_of(dataset: tf.data.Dataset) -> int | None:
    """The rows of the batches that a dataset makes; None if only reading tells."""
    variant = tf.data.experimental.to_variant(dataset)
    size = int(tf.raw_ops.ComputeBatchSize(input_dataset=variant))
    return size if size > 0 else None


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
        examples=rows,
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
            each = tf.gather(indices, tf.ragged.range(low - begin, high - begin).flat_values)
            taken = [take(arrays, mine) for mine in tf.split(each, high - low, num=local)]
            return tuple(zip(tf.unstack(counts, local), [size] * local, taken, strict=True))

        options = tf.data.Options()  # nothing to optimize, which takes longer than a short fit
        options.experimental_optimization.apply_default_optimizations = False
        numbers = tf.data.Dataset.range(start, 2**62)
        as_it_is = tf.autograph.experimental.do_not_convert(parts)
        return in_parallel(numbers, as_it_is).with_options(options)

    return tf.function(dataset, autograph=False)


def _check_batches(spec: Specs, replicas: int) -> None:
    """Check the structure of the batches of a dataset.

    Raises:
        TrainingError: no input, or tensors without rows. `checked_batch_size` compares rows.
    """
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
        each = ", ".join(f"{name} of shape {list(shape)}" for name, shape in shapes.items())
        raise TrainingError(
            f"A batch of the dataset does not have one row for each example: it has {each}. Call"
            f" .batch(global_batch_size) on the dataset. {SHARED_TENSOR}"
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
        examples: in arrays; None of other data.
        is_infinite: the dataset starts the next pass by itself, so that no step has to ask whether
            the data has ended. Under several workers each such question is a collective.
        begin: returns the global batch of a pass that the first pass begins with, from the data's
            own position.
        needs_row_count: the tasks have to sum the rows of their parts of each global batch.
        reads_own_shard: each of several workers reads its own rows of each global batch.
        reads_once: the data is a Python iterator, which has no second pass.
        dataset: a dataset of one pass of whole global batches, if each task reads all of them.
        arrays: all of the data, if each task has it in memory.
        advance: called with the number of global batches that were used.
        ended: called when a pass is over.
    """

    parts_of: PartsOf
    from_step: Callable[[int], PartsOf] | None = None
    steps: int | None = None
    batch_size: int | None = None
    examples: int | None = None
    is_infinite: bool = False
    begin: Callable[[], int] = lambda: 0
    needs_row_count: bool = False
    reads_own_shard: bool = False
    reads_once: bool = False
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


@dataclass(frozen=True)
class Epoch:
    """One epoch: its iterator and its number of global batches.

    Attributes:
        iterator: over the parts of this task's replicas.
        steps: global batches of the epoch; None: until the data ends.
        known_length: whether the data is known to have these steps.
        needs_row_count: whether the tasks have to agree in each step on what the global batch is.
        completed: global batches of the same epoch that are in the metrics already.
        advance: called with the number of batches that an execution used.
        batch_size: examples of a global batch; None if only reading tells.
    """

    iterator: BatchIterator
    steps: int | None
    known_length: bool
    needs_row_count: bool
    completed: int
    advance: Callable[[int], None]
    batch_size: int | None = None


@dataclass(frozen=True)
class Execution:
    """The result of an execution: several steps of an epoch.

    Attributes:
        logs: over the epoch so far, the same on every worker.
        steps: global batches that were used.
        chief_seconds: how long the execution before this one took on the chief.
        stop_requested: a task received SIGTERM before this execution began.
    """

    logs: Logs
    steps: int
    chief_seconds: float
    stop_requested: bool = False


class Epochs:
    """The epochs of one `fit`, `evaluate` or `predict`: where each begins and ends in the data.

    Args:
        feed: returns what the steps iterate over, from global batches.
        requested: steps of an epoch, if the caller gave a number.
        inspect: called with the first batch of a dataset (None if there is no batch) before the
            first step gets it. Nothing else is read for this.

    Raises:
        TrainingError: infinite data without a number of steps, or no data.
    """

    def __init__(
        self,
        batches: GlobalBatches,
        feed: Callable[[Any], Any],
        requested: int | None,
        inspect: Callable[[Structure], None] | None = None,
    ) -> None:
        # As in Keras, 0 means all steps of the data.
        requested = min(filter(None, [requested, keras.config.max_steps_per_epoch()]), default=None)
        if batches.steps is None and batches.is_infinite and requested is None:
            raise TrainingError(
                "The data is infinite, so an epoch has no end. Pass steps_per_epoch to `fit`, or"
                " steps to `evaluate` and `predict`."
            )
        if batches.steps == 0:
            raise TrainingError(EMPTY)
        self._batches = batches
        self._feed = feed
        self._requested = requested
        self._inspect = inspect
        self._source: Any = None  # a tf.data.Iterator over the dataset of the running pass
        self._input: Any = None  # what steps iterate over
        # Of the input: its source and its steps, () if it is for several epochs, None for nothing.
        self._input_of: tuple[Any, ...] | None = None
        self._iterator: BatchIterator | None = None  # over an input for several epochs
        self._position = batches.begin()  # in the running pass
        self._completed = 0  # steps of the next epoch that are done
        self._longest = self._position  # steps of the longest epoch so far

    @property
    def steps(self) -> int | None:
        """Global batches in an epoch; None if only reading tells."""
        return self._requested or self._batches.steps

    @property
    def sizes(self) -> dict[str, int | None]:
        """Sizes of the data by name; None if only reading tells."""
        batches, steps = self._batches, self.steps
        sizes = {"batch_size": batches.batch_size, "number of examples": batches.examples}
        return {n: size and int(size) for n, size in {**sizes, "steps per epoch": steps}.items()}

    @property
    def can_begin_anywhere(self) -> bool:
        """Whether `begin_after` reads nothing of what it passes over."""
        return self._batches.from_step is not None and self._batches.steps is not None

    def reset(self) -> None:
        """Calls the data's `on_epoch_end`, as Keras does before `fit` and `evaluate`."""
        self._batches.on_epoch_end()

    def rewind(self) -> None:
        """Begins the next epoch at the start of the data."""
        self.reset()
        if self._position != 0 or self._batches.steps is None:
            self._iterator = None
        self._position, self._source = 0, None

    @contextlib.contextmanager
    def next(self) -> Iterator[Epoch]:
        """The next epoch. Calls the data's `on_epoch_begin`; `is_done` calls `on_epoch_end`."""
        batches, requested = self._batches, self._requested
        known = batches.steps is not None or batches.is_infinite
        completed, self._completed = self._completed, 0
        steps = requested = None if requested is None else max(requested - completed, 0)
        if batches.steps is not None:
            steps = self._move_on(batches.steps, requested)
            if requested is not None and steps < requested:
                self._warn_of_end(steps)
        batches.on_epoch_begin()
        try:
            yield Epoch(
                self._begin(steps),
                steps,
                known,
                batches.needs_row_count,
                completed,
                batches.advance,
                batches.batch_size,
            )
        except BaseException:
            batches.on_epoch_end()  # stops workers that read ahead
            raise

    def end_epoch(self, epoch: Epoch, steps: int, *, stopped: bool) -> None:
        """Ends an epoch.

        Args:
            steps: steps that were done.
            stopped: a callback stopped the training in this epoch. Then the data's `on_epoch_end`
                is not called, as in Keras.

        Raises:
            TrainingError: the data is empty.
        """
        batches = self._batches
        longest, self._longest = self._longest, max(self._longest, steps)
        if not stopped:
            batches.on_epoch_end()
        if epoch.steps is None or steps < epoch.steps:
            self._iterator = None
            if stopped:
                return
            if self._longest == 0:
                raise TrainingError(EMPTY)
            if self._requested is not None and steps < self._requested:
                self._warn_of_end(steps)
            elif batches.reads_once and steps < longest:
                warn(
                    f"the generator has ended: this epoch had {steps} steps, an earlier one"
                    f" {longest}. Pass steps_per_epoch, and yield the batches of all epochs."
                )
            self._source = None
            batches.ended()
        elif batches.steps is not None and self._position == 0:
            batches.ended()
            if not batches.is_infinite:
                self._iterator = None
            if batches.dataset is not None and not stopped:
                # Keras makes an iterator here. If the epochs have no number of steps, Keras makes
                # another one when the next epoch begins.
                self._source = without_prefetch(batches.dataset)

    def _warn_of_end(self, steps: int) -> None:
        warn(
            f"the data ended after {steps} of the {self._requested} steps requested in this epoch."
            " Request fewer steps, or repeat the data with .repeat()."
        )

    def _move_on(self, in_pass: int, requested: int | None) -> int:
        """Set the position after the next epoch; returns the steps of the epoch.

        An epoch of `requested` steps continues where the last one ended. The epoch in which a pass
        ends is short, and the next epoch starts a new pass.
        """
        left = in_pass - self._position
        steps = left if requested is None else min(requested, left)
        self._position = (self._position + steps) % in_pass
        return steps

    def _begin(self, steps: int | None) -> BatchIterator:
        """The iterator of an epoch: a new one, or that of the epoch before."""
        batches, inspect = self._batches, self._inspect
        if batches.dataset is None:
            self._iterator = self._iterator or iter(self._feed(batches))
            return self._iterator
        if self._requested is None and inspect is None:
            if self._input_of != ():
                self._input, self._input_of = self._feed(batches), ()
            return iter(self._input)
        if self._requested is None or self._source is None:
            self._source = without_prefetch(batches.dataset)
        # Iterating over the same input again reads on.
        wanted = (self._source, steps)
        if inspect is not None or self._input_of != wanted:
            of_epoch = parts_of_dataset(self._dataset_of_epoch(steps))
            self._input = self._feed(replace(batches, parts_of=of_epoch))
            self._input_of = wanted if inspect is None else None  # one with a first batch, once
        return iter(self._input)

    def _dataset_of_epoch(self, steps: int | None) -> tf.data.Dataset:
        """The next global batches of the source; the first batch of a training is inspected.

        Reading ahead stops at the end of the epoch. Reading ahead into another repetition of the
        data would make iterators at unknown times.
        """
        inspect, self._inspect = self._inspect, None
        first = None if inspect is None else next(self._source, None)
        if inspect is not None:
            inspect(first)
        if first is None:
            return rest_of(self._source, steps)
        rest = rest_of(self._source, None if steps is None else steps - 1)
        return tf.data.Dataset.from_tensors(first).concatenate(rest)

    def begin_after(self, epochs: int, *, completed: int = 0) -> None:
        """Pass over epochs. Data that cannot begin anywhere is read.

        Args:
            completed: steps of the epoch after them, which are passed over, too. There may be
                some only if the data `can_begin_anywhere`.
        """
        batches = self._batches
        if batches.from_step is None or batches.steps is None:
            self._read_past(epochs)
            return
        passed = completed + sum(
            self._move_on(batches.steps, self._requested) for _ in range(epochs)
        )
        self._position = (self._position + completed) % batches.steps
        self._completed = completed
        self._batches = replace(batches, parts_of=batches.from_step(passed))

    def begin_at_position(self, *, completed: int) -> None:
        """Begins at the data's own position, after `completed` steps of an epoch."""
        self._position = self._batches.begin()
        self._longest = self._position
        self._completed = completed

    def _read_past(self, epochs: int) -> None:
        """Read epochs as a training reads them: the order of examples may depend on it."""
        for _ in range(epochs):
            with self.next() as epoch:
                if not isinstance(epoch.iterator, Iterator):
                    return  # workers that read for themselves keep no common order
                steps = 0
                with contextlib.suppress(StopIteration, tf.errors.OutOfRangeError):
                    while epoch.steps is None or steps < epoch.steps:
                        next(epoch.iterator)
                        steps += 1
            self.end_epoch(epoch, steps, stopped=False)
