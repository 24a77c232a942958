"""Batches: everything that `fit`, `evaluate` and `predict` accept, as global batches.

Every task of a cluster gets the data that one device would get. A global batch is split into one
contiguous part for each replica of the cluster, in replica order. A task reads only the parts of
its own replicas. `reading.batches_of` chooses the class for the data of a call:

    ArrayBatches      arrays (keras_batches.py)
    DatasetBatches    a tf.data.Dataset
    KerasBatches      a PyDataset or a generator
    OrderedBatches    from_arrays, from_tfrecords and from_source (ordered.py)
    ShardBatches      from_dataset_fn (function.py)
    WorkerBatches     from_dataset_fn, read by the workers of parameter servers (worker_batches.py)
"""

from __future__ import annotations

import abc
import functools
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from tfdist_ext.data.pipelines import Part, PartsOf, Specs, Structure
from tfdist_ext.data.sharded import ShardedDataset
from tfdist_ext.data.shards import Shard

# An iterator over what an engine feeds: for each global batch, this task's parts of it.
BatchIterator: TypeAlias = tf.data.Iterator | tf.distribute.DistributedIterator

# A global batch as a task gets it: a part for each of its replicas.
Parts: TypeAlias = tuple[Part, ...] | tf.distribute.DistributedValues

# Returns what the steps iterate over, from the function that makes the parts of some replicas.
Feed: TypeAlias = Callable[[PartsOf], Iterable[Parts]]

# Called with the first batch of a dataset (None: no batch) before the first step gets it.
Inspect: TypeAlias = Callable[[Structure], None] | None


class Position(NamedTuple):
    """A position in the data: the number of a pass, and of a global batch in it."""

    in_pass: int = 0
    step: int = 0


@dataclass(frozen=True)
class Readers:
    """The tasks that read the data of a call.

    Attributes:
        replicas: number of replicas of all tasks.
        shard: what this task reads if each task reads its own shard.
        from_each: returns a number or an array of each of these tasks, in order.
        coordinator: a ClusterCoordinator if its workers may read the data; else None.
        workers: number of workers of the coordinator.
    """

    replicas: int = 1
    shard: Shard = field(default_factory=lambda: Shard(0, 1))
    from_each: Callable[[np.ndarray], np.ndarray] = np.atleast_1d
    coordinator: Any = None
    workers: int = 0


class Batches(abc.ABC):
    """The global batches of the data of a call, in passes over the data.

    If `needs_row_count` is set, a part has 1 in place of the number of rows of its global batch, or
    0 if the data of this task has ended. The pass is over when all parts have 0.

    Attributes:
        element_spec: tf.TypeSpecs of one global batch; None for a part that is left out.
        steps: global batches in a pass; None if only reading tells.
        batch_size: examples in a global batch; None if only reading tells.
        examples: in arrays; None of other data.
        arrays: all of the data, if each task has it in memory.
        sharded: the ShardedDataset that is read; None of other data.
        data: the same if a training moves its position and saves it in checkpoints; else None.
        is_infinite: the iterator starts the next pass by itself, so that no step has to ask whether
            the data has ended. Under several workers each such question is a collective.
        has_order: the batches of all tasks have one order, which `predict` needs.
        needs_row_count: the tasks have to sum the rows of their parts of each global batch.
        reads_own_shard: each of several workers reads its own rows of each global batch.
        is_read_by_all: each task reads whole global batches, so their content can be compared.
        reads_once: the data is a Python iterator, which has no second pass.
    """

    examples: int | None = None
    arrays: Structure = None
    sharded: ShardedDataset | None = None
    data: ShardedDataset | None = None
    has_order = True
    needs_row_count = False
    reads_own_shard = False
    is_read_by_all = False
    reads_once = False

    def __init__(
        self,
        element_spec: Specs,
        *,
        steps: int | None = None,
        batch_size: int | None = None,
        is_infinite: bool = False,
    ):
        # Keras's generators have an Optional, which has no shape, for a part that is left out.
        self.element_spec: Specs = keras.tree.map_structure(
            lambda spec: spec if hasattr(spec, "shape") else None, element_spec
        )
        self.steps = steps
        self.batch_size = batch_size
        self.is_infinite = is_infinite

    @property
    def known_length(self) -> bool:
        """Whether the data is known to have the steps of an epoch."""
        return self.steps is not None or self.is_infinite

    @property
    def settings(self) -> dict[str, Any]:
        """What must be the same on all workers, by name."""
        state = {} if self.sharded is None else self.sharded.state()
        named_state = {f"{name} in the data's state": value for name, value in state.items()}
        return {"batch_size": self.batch_size, "batches in the data": self.steps, **named_state}

    @abc.abstractmethod
    def iterators(self, feed: Feed, *, in_pieces: bool, inspect: Inspect) -> Iterators:
        """Returns the factory of the epochs' iterators.

        Args:
            in_pieces: the caller gave a number of steps, so an epoch need not be a pass.
            inspect: called with the first batch of data that all tasks read.
        """

    def skip(self, iterator: Any, steps: int | None, report: Callable[[], object]) -> int:
        """Reads `steps` global batches, or to the end; returns how many all tasks have read."""
        skipped = 0
        for _ in itertools.islice(iterator, steps):
            skipped += 1
            report()
        return skipped

    def on_epoch_begin(self) -> None:  # noqa: B027 (most data has no such method)
        """Calls the data's own method, as Keras does."""

    def on_epoch_end(self) -> None:  # noqa: B027
        """Calls the data's own method, as Keras does."""


class PositionedBatches(Batches):
    """Batches that can be read from any position."""

    def span(self, start: Position) -> tuple[int, int]:
        """The numbers [first, stop) of the batches to read, counted from the first pass."""
        assert self.steps is not None
        begin = start.in_pass * self.steps
        return begin + start.step, 2**62 if self.is_infinite else begin + self.steps

    @abc.abstractmethod
    def parts(self, first: int, local: int, replicas: int, start: Position) -> tf.data.Dataset:
        """Returns the parts of some replicas, as a dataset of `tuple[Part, ...]`.

        Args:
            first: the first local replica.
            local: number of replicas of this task.
            replicas: number of replicas of all tasks.
            start: where to begin.
        """

    def iterators(self, feed: Feed, *, in_pieces: bool, inspect: Inspect) -> Iterators:
        def create(start: Position) -> Any:
            return iter(feed(functools.partial(self.parts, start=start)))

        return Iterators(create, continues=self.is_infinite)


class Iterators:
    """One iterator for all epochs, until a pass ends that does not start the next by itself.

    Args:
        create: returns an iterator that begins at a position.
        continues: an iterator starts the next pass by itself.
    """

    def __init__(self, create: Callable[[Position], Any], *, continues: bool):
        self._create = create
        self._continues = continues
        self._iterator: Any = None

    def of_epoch(self, steps: int | None, start: Position) -> Any:
        """Returns the iterator of an epoch of `steps` global batches; None: until the data ends."""
        if self._iterator is None:
            self._iterator = self._create(start)
        return self._iterator

    def pass_ended(self) -> None:
        """Prepares the next pass: all batches of a pass with a known length were used."""
        if not self._continues:
            self.forget()

    def forget(self) -> None:
        """Makes the next epoch begin with a new iterator."""
        self._iterator = None
