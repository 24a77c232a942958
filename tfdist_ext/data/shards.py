"""Shards of a range of rows and of a list of files, and the shard of a task."""

from __future__ import annotations

import enum
import heapq
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import tensorflow as tf

from tfdist_ext.cluster import ClusterConfig, Task
from tfdist_ext.data.files import (
    FILES_AT_ONCE,
    Patterns,
    begins_with_record,
    files_of,
    indexes_of,
    stamp_of,
)
from tfdist_ext.errors import DataError
from tfdist_ext.messages import check_int, shown
from tfdist_ext.user_frames import filter_traceback

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
    """Check that a field of a frozen dataclass is in [low, high]; make it a plain integer."""
    number = check_int(getattr(owner, name), called or name, low, high, error=DataError)
    object.__setattr__(owner, name, number)


@filter_traceback
@dataclass(frozen=True)
class Shard:
    """One of several disjoint parts of the data.

    Attributes:
        index: the index of the shard, starting at 0.
        count: the number of shards.

    Raises:
        DataError: `count` is not a positive integer, or `index` is not in [0, count).
    """

    index: int
    count: int

    def __post_init__(self) -> None:
        check_field(self, "count", "the count of a Shard", 1)
        check_field(self, "index", f"the index of a Shard of {self.count}", 0, self.count - 1)

    @classmethod
    def of(cls, context: ReadBy) -> Shard:
        """Returns the shard of this process.

        Each worker has one shard. If a multi-worker cluster has a chief, the chief has the first
        shard. A single process, the coordinator of parameter servers and an evaluator read all
        data, which is `Shard(0, 1)`.

        Args:
            context: a `tf.distribute.InputContext`, a `ClusterConfig` or a
                `tf.distribute.Strategy`. A `Shard` is returned unchanged.

        Raises:
            DataError: `context` has another type, or the task is a parameter server, which reads no
                data.
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
                spec = resolver.cluster_spec().as_dict()
                jobs = {job: tuple(addresses) for job, addresses in spec.items()}
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
    """How to treat rows that do not divide evenly among the shards."""

    KEEP = "keep"  # every row once; some shards have one row more than others
    DROP = "drop"  # the last n % count rows are left out; all shards have the same size
    PAD = "pad"  # every row once; shards with one row less get a row of sample weight 0


def check_remainder(remainder: object) -> None:
    """Raise DataError unless an argument is a Remainder."""
    if not isinstance(remainder, Remainder):
        raise DataError(
            "remainder must be Remainder.KEEP, Remainder.DROP or Remainder.PAD, got"
            f" {shown(remainder)}."
        )


class ShardRange(NamedTuple):
    """The range of rows of a shard.

    Attributes:
        start: the first row.
        stop: the row after the last row.
        padding: the number of padded rows after the range.
    """

    start: int
    stop: int
    padding: int = 0

    @property
    def size(self) -> int:
        """The number of rows, including padded rows."""
        return self.stop - self.start + self.padding


@filter_traceback
def shard_range(n: int, shard: Shard, remainder: Remainder = Remainder.KEEP) -> ShardRange:
    """Returns the contiguous range of rows of a shard.

    With KEEP, the sizes of shards differ by at most one. With DROP, each shard has n // count rows,
    and the last n % count rows are left out. With PAD, each shard has the rows of KEEP, padded to
    ceil(n / count) rows. Give padded rows the sample weight 0, so that losses and metrics stay
    exact.

    Raises:
        DataError: `n` is negative or not an integer, or another argument has the wrong type.
    """
    n = check_int(n, "the number of rows to split", error=DataError)
    _check_shard(shard)
    check_remainder(remainder)
    if remainder is Remainder.DROP:
        size = n // shard.count
        return ShardRange(size * shard.index, size * (shard.index + 1))
    start, stop = bounds(n, shard.index, shard.count)
    size = -(-n // shard.count) if remainder is Remainder.PAD else stop - start
    return ShardRange(start, stop, size - (stop - start))


def _check_shard(shard: object) -> None:
    if not isinstance(shard, Shard):
        raise DataError(f"shard must be a Shard(index, count), got {shown(shard)}.")


@filter_traceback
def shard_files(patterns: Patterns, shard: Shard, *, check: bool = True) -> list[str]:
    """Returns the files of a shard. Each file belongs to one shard.

    All shards get about the same number of bytes. Files are assigned from the largest to the
    smallest, each to the shard with the fewest bytes.

    Args:
        patterns: a path, a pattern (`*`, `?`, `[a-z]`) or a list of them, on any file system of
            `tf.io.gfile`. All tasks must see the same files under the same names.
        shard: the index of the shard, and the number of shards.
        check: if True, reads the length fields of TFRecord files, so that a truncated file raises
            an error immediately.

    Returns:
        The sorted paths.

    Raises:
        DataError: a pattern matches no file, there are fewer files than shards, or a file cannot be
            read or is truncated.
    """
    _check_shard(shard)
    files = files_of(patterns)
    if len(files) < shard.count:
        raise DataError(
            f"{len(files)} files are not enough for {shard.count} shards. Write more files, or use"
            " from_tfrecords, which splits the records."
        )
    with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
        sizes = [size for size, _ in pool.map(stamp_of, files)]
        own = [files[i] for i in assign(sizes, shard.count)[shard.index]]
        if check and any(list(pool.map(begins_with_record, own))):
            indexes_of(own)
    return own


def assign(sizes: Sequence[int], count: int) -> list[list[int]]:
    """Divide sizes into `count` shares with about equal sums.

    The largest size goes first, each to the share with the smallest sum. The largest sum is at most
    4/3 of the optimum (Graham 1969, "Bounds on multiprocessing timing anomalies").

    Returns:
        The positions in `sizes` of each share, rising.
    """
    shares: list[list[int]] = [[] for _ in range(count)]
    # (sum, number of sizes, share): sizes of 0 are spread, too.
    filled = [(0, 0, share) for share in range(count)]
    for position in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        total, number, share = heapq.heappop(filled)
        shares[share].append(position)
        heapq.heappush(filled, (total + sizes[position], number + 1, share))
    return [sorted(share) for share in shares]


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
