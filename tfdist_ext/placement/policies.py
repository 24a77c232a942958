"""Placement policies: each a pure function of the variables and the tasks.

A custom policy is a function, here one that keeps all variables of a layer together:

    def by_layer(specs, tasks):
        return [[zlib.crc32(spec.path.split("/")[0].encode()) % tasks.count] for spec in specs]

    plan(specs, 4, policy=by_layer)

It is given the variables that no rule has put anywhere, in the order of their creation, and returns
for each of them the tasks of its pieces: [2] is whole on task 2; [0, 1, 0] is three even pieces
along axis 0, in the order of rows. `tasks.pieces` says where a rule asks for a number of pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heapreplace
from typing import Any

from tfdist_ext.errors import PlacementError
from tfdist_ext.messages import shown
from tfdist_ext.placement.specs import VariableSpec
from tfdist_ext.user_frames import filter_traceback

__all__ = ["Policy", "Tasks", "greedy", "partitioned", "round_robin"]


@dataclass(frozen=True)
class Tasks:
    """The tasks, as a policy gets them.

    Attributes:
        count: how many there are.
        filled: bytes that rules have put on each.
        loaded: load that rules have put on each.
        budgets: bytes that each may hold at most; None without a budget.
        pieces: path -> number of pieces that its rule asks for; for other variables the policy
            decides.
    """

    count: int
    filled: tuple[int, ...]
    loaded: tuple[float, ...]
    budgets: tuple[int, ...] | None = None
    pieces: dict[str, int] = field(default_factory=dict)


Policy = Callable[[Sequence[VariableSpec], Tasks], Sequence[Sequence[int]]]


@filter_traceback
def round_robin(specs: Sequence[VariableSpec], tasks: Tasks) -> list[list[int]]:
    """Piece i on task i modulo tasks, in the order of creation, whatever its bytes.

    It is what ParameterServerStrategy does with a model's weights.
    """
    placed: list[list[int]] = []
    at = 0
    for spec in specs:
        pieces = tasks.pieces.get(spec.path, 1)
        placed.append([(at + piece) % tasks.count for piece in range(pieces)])
        at += pieces
    return placed


@filter_traceback
def greedy(specs: Sequence[VariableSpec], tasks: Tasks) -> list[list[int]]:
    """Each piece, in the order of creation, on the task with the fewest bytes so far.

    It sees no variable before its turn, so it can be used while a model is being built.
    """
    heap = [(held, task) for task, held in enumerate(tasks.filled)]
    heapify(heap)
    placed: list[list[int]] = []
    for spec in specs:
        mine: list[int] = []
        for size in spec.piece_bytes(tasks.pieces.get(spec.path, 1)):
            held, task = heap[0]
            heapreplace(heap, (held + size, task))
            mine.append(task)
        placed.append(mine)
    return placed


@filter_traceback
def partitioned(
    partitioner: Callable[[Any, Any], Sequence[int]],
    base: Policy = round_robin,
    *,
    shape_type: Callable[[tuple[int, ...]], Any] = tuple,
    dtype_type: Callable[[str], Any] = str,
) -> Policy:
    """Pieces as a partitioner cuts them, placed by another policy.

    TensorFlow's own partitioners take its own types, and this package's placement knows no
    TensorFlow, so they are passed in:

        partitioned(
            tf.distribute.experimental.partitioners.MinSizePartitioner(256 << 10, max_shards=4),
            shape_type=tf.TensorShape,
            dtype_type=tf.as_dtype,
        )

    Args:
        partitioner: called with a shape and a dtype, returns the number of pieces along each axis,
            all 1 but the first. Scalars are never cut and it is not asked about them.
        base: places the pieces.
        shape_type: makes what the partitioner takes for a shape, from a tuple.
        dtype_type: makes what the partitioner takes for a dtype, from its name.

    Returns:
        A policy. Rules that ask for a number of pieces go before the partitioner.
    """

    def policy(specs: Sequence[VariableSpec], tasks: Tasks) -> Sequence[Sequence[int]]:
        pieces = {
            spec.path: _pieces(
                spec, partitioner(shape_type(spec.shape), dtype_type(spec.dtype)), partitioner
            )
            for spec in specs
            if spec.shape and spec.rows and spec.path not in tasks.pieces
        }
        return base(specs, replace(tasks, pieces=pieces | tasks.pieces))

    name = getattr(partitioner, "__name__", type(partitioner).__name__)
    policy.__name__ = f"{name} with {getattr(base, '__name__', 'a policy')}"
    return policy


def _pieces(spec: VariableSpec, partitions: Sequence[int], partitioner: object) -> int:
    """How many pieces along axis 0; as TensorFlow does, no more than rows."""
    counts = [int(count) for count in partitions]
    if not counts or counts[0] < 1 or any(count != 1 for count in counts[1:]):
        raise PlacementError(
            f"the partitioner {shown(partitioner)} must cut {spec.path!r} of shape {spec.shape}"
            f" along axis 0 alone, got {shown(counts)}: all other numbers must be 1."
        )
    return min(counts[0], spec.rows)
