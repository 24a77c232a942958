"""A variable as placement sees it: its path, its bytes, and the pieces it can be cut into."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from tfdist_ext.errors import PlacementError
from tfdist_ext.messages import check_int, shown
from tfdist_ext.placement.sizes import itemsize
from tfdist_ext.user_frames import filter_traceback

__all__ = ["Held", "Place", "VariableShard", "VariableSpec", "piece_rows"]


@filter_traceback
@dataclass(frozen=True)
class VariableSpec:
    """A variable that need not exist.

    Attributes:
        path: the text that rules match, for example "dense/kernel". Paths of a model are unique.
        shape: the shape of the whole variable; () for a scalar.
        dtype: TensorFlow's name of the dtype.
        slots: number of optimizer slots, each of the variable's shape and dtype (Adam: 2).
        load: traffic of the whole variable in any unit, for example lookups in a step. All rows
            have the same share of the load.
        trainable: whether the variable has a gradient.
        weight_bytes: bytes of the whole variable without slots.
        bytes: bytes of the whole variable with its slots.

    Raises:
        PlacementError: an invalid path, shape, dtype or number.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    slots: int = 0
    load: float | None = None
    trainable: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.path, str) or not self.path:
            raise PlacementError(
                f"a variable's path must be a text that is not empty, got {shown(self.path)}."
            )
        object.__setattr__(self, "shape", _whole_shape(self.path, self.shape))
        slots = check_int(self.slots, f"slots of {self.path!r}", error=PlacementError)
        object.__setattr__(self, "slots", slots)
        is_number = isinstance(self.load, int | float) and not isinstance(self.load, bool)
        if self.load is not None and not (is_number and 0 <= self.load < math.inf):
            raise PlacementError(
                f"load of {self.path!r} must be a finite number of at least 0, or None, got"
                f" {shown(self.load)}."
            )
        itemsize(self.dtype)  # an unknown dtype is an error now

    @cached_property
    def weight_bytes(self) -> int:
        return math.prod(self.shape) * itemsize(self.dtype)

    @cached_property
    def bytes(self) -> int:
        return self.weight_bytes * (1 + self.slots)

    @property
    def rows(self) -> int:
        """The length of axis 0; 1 for a scalar, which cannot be cut."""
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        """Bytes of one row with its part of the slots; 0 without rows."""
        return self.bytes // self.rows if self.rows else 0

    def piece_bytes(self, pieces: int) -> list[int]:
        """Bytes of each even piece, slots included."""
        return [count * self.row_bytes for count in piece_rows(self.rows, pieces)]

    def piece_loads(self, pieces: int) -> list[float]:
        """Load of each even piece."""
        load = self.load or 0.0
        if pieces == 1:
            return [load]
        return [load * count / self.rows for count in piece_rows(self.rows, pieces)]

    def shards(self, tasks: Sequence[int]) -> tuple[VariableShard, ...]:
        """The even pieces on these tasks, in the order of rows."""
        ends = [0, *accumulate(piece_rows(self.rows, len(tasks)))]
        return tuple(map(VariableShard, tasks, ends, ends[1:]))


class VariableShard(NamedTuple):
    """Rows of a variable on a task. A scalar has one row.

    Attributes:
        task: index of the parameter server or the device.
        start: the first row.
        stop: the row after the last one.
    """

    task: int
    start: int
    stop: int


class Held(enum.Enum):
    """How tasks or devices hold a variable."""

    PIECES = "pieces"  # one or more pieces along axis 0, each on one task, its slots with it
    COPIES = "copies"  # a whole copy with slots on every device
    OWNED = "owned"  # a copy on every device; the slots on one of them


class Place(NamedTuple):
    """Where one variable is.

    Attributes:
        tasks: the tasks of the pieces, in the order of rows; the devices of the copies; or the
            owner of an owned variable.
        held: which of the three.
    """

    tasks: tuple[int, ...]
    held: Held = Held.PIECES

    def bytes_of(self, spec: VariableSpec, count: int) -> list[tuple[int, int]]:
        """(task, bytes of the variable there), for each piece, or for each of `count` copies."""
        if self.held is Held.PIECES:
            return list(zip(self.tasks, spec.piece_bytes(len(self.tasks)), strict=True))
        # Copies have their slots on all devices, an owned variable on one.
        sizes = (spec.weight_bytes, spec.bytes)
        return [(task, sizes[task in self.tasks]) for task in range(count)]


def piece_rows(rows: int, pieces: int) -> list[int]:
    """Rows of each piece: they differ by one at most, larger ones first.

    TensorFlow's embedding_lookup silently reads wrong rows of any other division.
    """
    least, more = divmod(rows, pieces)
    return [least + 1] * more + [least] * (pieces - more)


def _whole_shape(path: str, shape: Sequence[int]) -> tuple[int, ...]:
    try:
        whole = tuple(map(int, shape))
    except (TypeError, ValueError, OverflowError):
        whole = (-1,)
    if (whole and min(whole) < 0) or whole != tuple(shape):
        raise PlacementError(
            f"every dimension of {path!r} must be an integer of at least 0, got {shown(shape)}."
            " Build the model with the shapes of its input first."
        )
    return whole
