"""Splits a range into contiguous shards whose sizes differ by at most one."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import tensorflow as tf

from tfdist_ext.cluster import ClusterConfig, Task
from tfdist_ext.errors import DataError
from tfdist_ext.messages import check_int, shown
from tfdist_ext.user_frames import filter_traceback

__all__ = [
    "Number",
    "ReadBy",
    "Remainder",
    "Shard",
    "ShardRange",
    "bounds",
    "check_field",
    "check_remainder",
    "shard_range",
]

# What `Shard.of` takes.
ReadBy: TypeAlias = "Shard | ClusterConfig | tf.distribute.InputContext | tf.distribute.Strategy"
Number: TypeAlias = int | tf.Tensor


def bounds(n: Number, index: Number, count: Number) -> tuple[Number, Number]:
    """The half-open range [start, stop) of shard `index` of `count` in `n` rows, unchecked.

    It works on Python integers and on integer tensors.
    """
    return n * index // count, n * (index + 1) // count


def check_field(
    owner: object, name: str, called: str = "", low: int = 0, high: int | None = None
) -> None:
    """Check a field of a frozen dataclass, and make it a plain integer, as JSON needs it.

    Args:
        called: name of the field in messages; by default `name`.

    Raises:
        DataError: the field is not an integer in [low, high].
    """
    number = check_int(getattr(owner, name), called or name, low, high, error=DataError)
    object.__setattr__(owner, name, number)


@filter_traceback
@dataclass(frozen=True)
class Shard:
    """One of `count` parts that together are everything.

    Attributes:
        index: which part, from 0.
        count: how many parts there are.

    Raises:
        DataError: `count` is not an integer from 1, or `index` is not below it.
    """

    index: int
    count: int

    def __post_init__(self) -> None:
        check_field(self, "count", "the count of a Shard", 1)
        check_field(self, "index", f"the index of a Shard of {self.count}", 0, self.count - 1)

    @classmethod
    def of(cls, context: ReadBy) -> Shard:
        """The shard that this process reads.

        Chief and workers share the data, the chief first; in a cluster with parameter servers only
        the workers do. A single process, the coordinator of parameter servers and an evaluator read
        all of the data: Shard(0, 1).

        Args:
            context: a `tf.distribute.InputContext`, a `ClusterConfig` or a
                `tf.distribute.Strategy`; a Shard stays as it is.

        Raises:
            DataError: another type, or a task that reads no data (a parameter server).
        """
        if isinstance(context, Shard):
            return context
        if isinstance(context, ClusterConfig):
            return _shard_of_task(context)
        if isinstance(context, tf.distribute.InputContext):
            return cls(context.input_pipeline_id, context.num_input_pipelines)
        if isinstance(context, tf.distribute.MultiWorkerMirroredStrategy):
            resolver = context.cluster_resolver
            if resolver is not None and resolver.cluster_spec():
                jobs = {job: tuple(of) for job, of in resolver.cluster_spec().as_dict().items()}
                task = Task(resolver.task_type, resolver.task_id)
                return _shard_of_task(ClusterConfig(jobs, task))
        if isinstance(context, tf.distribute.Strategy):
            return cls(0, 1)
        raise DataError(
            "Shard.of takes a tf.distribute.InputContext, a ClusterConfig or a"
            f" tf.distribute.Strategy, got {shown(context)}. Use Shard(index, count) instead."
        )

    def __str__(self) -> str:
        return f"shard {self.index} of {self.count}"


class Remainder(enum.Enum):
    """What happens to rows that do not divide by the number of shards."""

    KEEP = "keep"  # every row once; some shards have one row more than others
    DROP = "drop"  # the last n % count rows are left out; all shards have the same size
    PAD = "pad"  # every row once; shards with one row less get a row of sample weight 0


def check_remainder(remainder: object) -> None:
    """Check the type of an argument `remainder`.

    Raises:
        DataError: it is not a Remainder.
    """
    if not isinstance(remainder, Remainder):
        raise DataError(
            "remainder must be Remainder.KEEP, Remainder.DROP or Remainder.PAD, got"
            f" {shown(remainder)}."
        )


class ShardRange(NamedTuple):
    """The rows of a shard.

    Attributes:
        start: the first row.
        stop: the row after the last one.
        padding: rows of sample weight 0 that come after them.
    """

    start: int
    stop: int
    padding: int = 0

    @property
    def size(self) -> int:
        """Rows of the shard, padding included."""
        return self.stop - self.start + self.padding


@filter_traceback
def shard_range(n: int, shard: Shard, remainder: Remainder = Remainder.KEEP) -> ShardRange:
    """The rows of `n` that are the shard's: contiguous, in the order of shards.

    KEEP gives sizes that differ by at most one. DROP gives n // count rows to each shard and
    leaves out the last n % count. PAD gives the rows of KEEP, and ceil(n / count) rows with the
    padding. Give padded rows the sample weight 0, so that losses and metrics stay exact.

    Raises:
        DataError: `n` is not a whole number from 0, or another argument is of another type.
    """
    n = check_int(n, "the number of rows to share out", error=DataError)
    if not isinstance(shard, Shard):
        raise DataError(f"shard must be a Shard(index, count), got {shown(shard)}.")
    check_remainder(remainder)
    if remainder is Remainder.DROP:
        size = n // shard.count
        return ShardRange(size * shard.index, size * (shard.index + 1))
    start, stop = bounds(n, shard.index, shard.count)
    size = -(-n // shard.count) if remainder is Remainder.PAD else stop - start
    return ShardRange(start, stop, size - (stop - start))


def _shard_of_task(cluster: ClusterConfig) -> Shard:
    reading = ["worker"] if "ps" in cluster.jobs else ["chief", "worker"]
    readers = [task for task in cluster.tasks() if task.type in reading]
    task = cluster.task
    if task in readers:
        return Shard(readers.index(task), len(readers))
    if task.type in ("chief", "evaluator"):  # a coordinator, or a task that evaluates on all data
        return Shard(0, 1)
    raise DataError(
        f"{task} reads no data: the readers of this cluster are {', '.join(map(str, readers))}."
    )
