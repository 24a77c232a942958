"""Shards, disjoint and complete: of a range, with sizes that differ by one at most; or of sizes.

Pure arithmetic, the same for every task.
"""

from __future__ import annotations

import enum
import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from tfdist_ext.cluster import ClusterConfig, Task
from tfdist_ext.errors import DataError
from tfdist_ext.messages import check_int, shown
from tfdist_ext.user_frames import filter_traceback

if TYPE_CHECKING:
    import tensorflow as tf

__all__ = [
    "Number",
    "ReadBy",
    "Remainder",
    "Shard",
    "ShardRange",
    "assign",
    "bounds",
    "check_field",
    "check_remainder",
    "imbalance",
    "shard_range",
]


# Who reads a shard: what `Shard.of` takes.
ReadBy: TypeAlias = "Shard | ClusterConfig | tf.distribute.InputContext | tf.distribute.Strategy"
# A number that is known, or one of a pipeline that is traced.
Number: TypeAlias = "int | tf.Tensor"


def bounds(n: Number, index: Number, count: Number) -> tuple[Number, Number]:
    """The half-open range [start, stop) of shard `index` of `count` in `n` rows, unchecked.

    Works on Python integers and on integer tensors alike, because the formula has no branches:
    the same line cuts a batch inside a tf.data pipeline and in a table test.
    """
    return n * index // count, n * (index + 1) // count


def check_field(
    owner: object, name: str, called: str = "", low: int = 0, high: int | None = None
) -> None:
    """Make a field of a frozen dataclass a plain integer, which fits into messages and JSON.

    Args:
        called: in messages; by default the field's name.

    Raises:
        DataError: it is no integer in [low, high].
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
        DataError: `count` is no whole number from 1, or `index` is not below it.
    """

    index: int
    count: int

    def __post_init__(self) -> None:
        check_field(self, "count", "the count of a Shard", 1)
        check_field(self, "index", f"the index of a Shard of {self.count}", 0, self.count - 1)

    @classmethod
    def of(cls, context: ReadBy) -> Shard:
        """The shard that this process reads, in a cluster where each process reads its own.

        Chief and workers share the data, the chief first; in a cluster with parameter servers the
        workers alone do. A process that hands out everything (a single one, the coordinator of a
        ParameterServerStrategy) and an evaluator read all of it: Shard(0, 1).

        Args:
            context: a `tf.distribute.InputContext`, a `ClusterConfig` or a
                `tf.distribute.Strategy`; a Shard stays as it is.

        Raises:
            DataError: it is none of these, or a task that reads no data (a parameter server).
        """
        if isinstance(context, Shard):
            return context
        import tensorflow as tf  # costly, and the arithmetic of shards does without

        if isinstance(context, tf.distribute.InputContext):
            return cls(context.input_pipeline_id, context.num_input_pipelines)
        if isinstance(context, ClusterConfig):
            jobs = {
                job: [index for index, address in enumerate(addresses) if address]
                for job, addresses in context.jobs.items()
            }
            return _shard_of_task(context.task, jobs)
        if isinstance(context, tf.distribute.Strategy):
            # Only here does every process run the same program and read for itself.
            reads = isinstance(context, tf.distribute.MultiWorkerMirroredStrategy)
            resolver = context.cluster_resolver
            if not reads or resolver is None or not resolver.cluster_spec():
                return cls(0, 1)
            spec = resolver.cluster_spec()
            jobs = {job: spec.task_indices(job) for job in spec.jobs}
            return _shard_of_task(Task(resolver.task_type, resolver.task_id), jobs)
        raise DataError(
            "a shard must be asked for by a tf.distribute.InputContext, a ClusterConfig or a"
            f" tf.distribute.Strategy, got {shown(context)}. Give Shard(index, count) by hand."
        )

    def __str__(self) -> str:
        return f"shard {self.index} of {self.count}"


class Remainder(enum.Enum):
    """What happens to rows that do not divide by the number of shards.

    An enum and not a flag, because with DROP data is lost, and that should be read in the call.
    """

    KEEP = "keep"  # every row once; some shards have one row more than others
    DROP = "drop"  # the last n % count rows are left out; all shards have the same size
    PAD = "pad"  # every row once; shards that are one row short are filled up with weight 0


def check_remainder(remainder: object) -> None:
    """
    Raises:
        DataError: it is no Remainder.
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
    def rows(self) -> range:
        """The numbers of the real rows."""
        return range(self.start, self.stop)

    @property
    def size(self) -> int:
        """Rows of the shard, padding included."""
        return self.stop - self.start + self.padding


@filter_traceback
def shard_range(n: int, shard: Shard, remainder: Remainder = Remainder.KEEP) -> ShardRange:
    """The rows of `n` that are the shard's: contiguous, in the order of shards.

    KEEP gives sizes that differ by at most one. DROP gives n // count rows to each shard and
    leaves out the last n % count. PAD gives the rows of KEEP, and ceil(n / count) rows with the
    padding; a padded row is to get sample weight 0, so that losses and metrics stay exact.

    Raises:
        DataError: `n` is no whole number from 0, or another argument is of another type.
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


def _shard_of_task(task: Task, jobs: dict[str, list[int]]) -> Shard:
    """The task's place among those that read; `jobs` has the indices that have an address."""
    reading = ["worker"] if "ps" in jobs else ["chief", "worker"]
    readers = [Task(job, index) for job in reading for index in jobs.get(job, [])]
    if task in readers:
        return Shard(readers.index(task), len(readers))
    if task.type in ("chief", "evaluator"):  # a coordinator; one that evaluates on everything
        return Shard(0, 1)
    raise DataError(
        "the task must be one that reads data"
        f" ({' or '.join(sorted({reader.type for reader in readers}))}), got {task}. Ask for a"
        " shard there, or give Shard(index, count) by hand."
    )


def assign(sizes: Sequence[int], count: int) -> list[list[int]]:
    """Which of the sizes belong to each of `count` shares, so that their sums are much the same.

    The largest goes first, each onto the share that has the least; of equal ones, the first. The
    largest sum is at most 4/3 of what is possible (Graham 1969, "Bounds on multiprocessing timing
    anomalies"), and exactly even where all sizes are equal and divide.

    Returns:
        For each share the positions in `sizes`, rising; all of them, each once.
    """
    shares: list[list[int]] = [[] for _ in range(count)]
    # (bytes, sizes, share): empty sizes are spread, too.
    filled = [(0, 0, share) for share in range(count)]
    for position in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        total, number, share = heapq.heappop(filled)
        shares[share].append(position)
        heapq.heappush(filled, (total + sizes[position], number + 1, share))
    return [sorted(share) for share in shares]


def imbalance(sums: Sequence[int]) -> float:
    """The largest over the mean: 1.0 is even; 1.0 also where there is nothing."""
    total = sum(sums)
    return max(sums) * len(sums) / total if total else 1.0
