"""A variable as placement sees it: its path, its bytes, and the pieces it can be cut into.

Bytes are written and read as texts such as "8GiB".
"""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import ml_dtypes  # noqa: F401  # adds bfloat16 and others to NumPy
import numpy as np

from tfdist_ext.errors import PlacementError
from tfdist_ext.messages import check_int, shown
from tfdist_ext.user_frames import filter_traceback

UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_SIZE = re.compile(r"\s*([0-9]{1,19}(?:\.[0-9]{1,9})?)\s*(?:([kmgtp]?)(i?)b)?\s*", re.IGNORECASE)


@filter_traceback
@dataclass(frozen=True)
class VariableSpec:
    """The path, shape, dtype and slots of a variable. The variable need not exist.

    Attributes:
        path: the unique path of the variable in the model, such as "dense/kernel". Rules match it.
        shape: the shape of the whole variable; () for a scalar.
        dtype: the name of the dtype, as in TensorFlow.
        slots: the number of optimizer slots of the same shape and dtype. Adam has 2.
        load: the traffic of the whole variable in any unit, for example lookups per step. The load
            is spread evenly over the rows.
        trainable: whether the variable has a gradient.
        weight_bytes: the bytes of the whole variable without slots.
        bytes: the bytes of the whole variable with its slots.

    Raises:
        PlacementError: the path, the shape, the dtype or a number is invalid.
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
                f"a variable's path must be a non-empty string, got {shown(self.path)}."
            )
        what = f"every dimension of {self.path!r}"
        shape = tuple(check_int(size, what, error=PlacementError) for size in self.shape)
        object.__setattr__(self, "shape", shape)
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
        """The length of axis 0. A scalar has one row."""
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        """The bytes of one row with its slots. 0 if the variable has no rows."""
        return self.bytes // self.rows if self.rows else 0

    def piece_bytes(self, pieces: int) -> list[int]:
        """Returns the bytes of each even shard, including slots."""
        return [count * self.row_bytes for count in piece_rows(self.rows, pieces)]

    def piece_loads(self, pieces: int) -> list[float]:
        """Returns the load of each even shard."""
        load = self.load or 0.0
        if pieces == 1:
            return [load]
        return [load * count / self.rows for count in piece_rows(self.rows, pieces)]

    def shards(self, tasks: Sequence[int]) -> tuple[VariableShard, ...]:
        """Returns even shards on these tasks, in the order of rows."""
        ends = [0, *accumulate(piece_rows(self.rows, len(tasks)))]
        return tuple(map(VariableShard, tasks, ends, ends[1:]))


class VariableShard(NamedTuple):
    """A range of rows of a variable on one task. A scalar has one row.

    Attributes:
        task: the index of the parameter server or the device.
        start: the first row.
        stop: the row after the last row.
    """

    task: int
    start: int
    stop: int


class Held(enum.Enum):
    """Whether a variable is in shards, copied, or owned."""

    PIECES = "pieces"  # one or more pieces along axis 0, each on one task, its slots with it
    COPIES = "copies"  # a whole copy with slots on every device
    OWNED = "owned"  # a copy on every device or worker; the slots of each row on one of them


class Place(NamedTuple):
    """The place of one variable in a plan.

    Attributes:
        tasks: the tasks of the shards in the order of rows, the devices of the copies, or the
            owners of the shards of an owned variable.
        held: whether the variable is in shards, copied, or owned.
    """

    tasks: tuple[int, ...]
    held: Held = Held.PIECES

    def parts(self, spec: VariableSpec, count: int) -> list[tuple[int, int, float]]:
        """Returns (task, bytes, load) of each shard, or of each of `count` copies."""
        if self.held is Held.PIECES:
            pieces = len(self.tasks)
            sizes, loads = spec.piece_bytes(pieces), spec.piece_loads(pieces)
            return list(zip(self.tasks, sizes, loads, strict=True))
        # Each copy serves its own replica.
        size = spec.bytes if self.held is Held.COPIES else spec.weight_bytes
        copies = [(task, size, (spec.load or 0.0) / count) for task in range(count)]
        owners = spec.shards(self.tasks) if self.held is Held.OWNED and self.tasks else ()
        row = (spec.bytes - spec.weight_bytes) // max(spec.rows, 1)
        return copies + [(shard.task, (shard.stop - shard.start) * row, 0.0) for shard in owners]


def piece_rows(rows: int, pieces: int) -> list[int]:
    """Rows of each piece: they differ by one at most, larger ones first.

    TensorFlow's embedding_lookup silently reads wrong rows of any other division.
    """
    least, more = divmod(rows, pieces)
    return [least + 1] * more + [least] * (pieces - more)


def itemsize(dtype: str) -> int:
    """Bytes of one value. A string counts as 16 bytes, as in TensorFlow's partitioners.

    Raises:
        PlacementError: there is no dtype of this name.
    """
    if dtype == "string":
        return 16
    try:
        return np.dtype(dtype if isinstance(dtype, str) else "").itemsize
    except TypeError:
        raise PlacementError(
            f"a dtype must be a TensorFlow dtype name such as float32, got {shown(dtype)}."
        ) from None


def parse_size(size: int | str, what: str = "budget") -> int:
    """Bytes from a number of bytes or a text: "8GiB", "500 MB", "1.5TiB", "1024".

    Args:
        size: kB, MB, GB, TB and PB are powers of 1000; KiB, MiB, GiB, TiB and PiB of 1024. Upper
            and lower case are the same. A fraction of a byte is dropped.
        what: name of the size in messages.

    Raises:
        PlacementError: neither a number of bytes nor such a text, or negative.
    """
    if isinstance(size, int) and not isinstance(size, bool) and size >= 0:
        return size
    match = _SIZE.fullmatch(size) if isinstance(size, str) else None
    # "1.5" without a unit is more likely a forgotten GiB than a byte and a half.
    if match is None or ("." in match[1] and match[2] is None):
        raise PlacementError(
            f"{what} must be a size, got {shown(size)}. Write bytes as a whole number, or a string"
            ' such as "8GiB" (2**30) or "500MB" (10**6).'
        )
    number, unit, binary = match.groups()
    power = " kmgtp".index(unit.lower()) if unit else 0
    return int(Decimal(number) * (1024 if binary else 1000) ** power)


def size_text(size: int) -> str:
    """A readable size: "17 B", "4.00 KiB", "2.50 GiB"; right to half a percent."""
    power = min(max(size.bit_length() - 1, 0) // 10, len(UNITS) - 1)
    return f"{size / 1024**power:.2f} {UNITS[power]}" if power else f"{size} B"


def worker_name(number: int) -> str:
    """The name of a worker in a plan."""
    return f"worker {number}"


def columns(lines: Sequence[Sequence[str]], align: str) -> str:
    """Lines of cells as a text with columns.

    Args:
        lines: the cells of each line.
        align: "<" or ">" for each column.
    """
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(f"{c:{a}{w}}" for c, a, w in zip(line, align, widths, strict=True)).rstrip()
        for line in lines
    )
