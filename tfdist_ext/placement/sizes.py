"""Bytes: how many a value of each dtype takes, and how people read and write them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal

from tfdist_ext.errors import PlacementError
from tfdist_ext.messages import nearest, shown
from tfdist_ext.user_frames import filter_traceback

__all__ = ["UNITS", "columns", "itemsize", "parse_size", "size_text"]

_ITEM_BYTES = {
    1: "bool int8 uint8 qint8 quint8 int4 uint4 float8_e4m3fn float8_e5m2",
    2: "float16 bfloat16 int16 uint16 qint16 quint16",
    4: "float32 int32 uint32 qint32",
    8: "float64 int64 uint64 complex64",
    # The length of strings is not known. TensorFlow's partitioners count 16 bytes, too.
    16: "complex128 string",
}
_ITEMSIZE = {name: size for size, names in _ITEM_BYTES.items() for name in names.split()}

UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_SIZE = re.compile(r"\s*([0-9]{1,19}(?:\.[0-9]{1,9})?)\s*(?:([kmgtp]?)(i?)b)?\s*", re.IGNORECASE)
_POWERS = "kmgtp"
_ADVICE = 'Write bytes as a whole number, or a text such as "8GiB" (2**30) or "500MB" (10**6).'


def itemsize(dtype: str) -> int:
    """Bytes of one value. A string counts as 16 bytes; int4 takes a whole byte, as in TensorFlow.

    Raises:
        PlacementError: TensorFlow has no dtype of this name.
    """
    size = _ITEMSIZE.get(dtype) if isinstance(dtype, str) else None
    if size is None:
        raise PlacementError(
            f"a dtype must be one that TensorFlow names, got {shown(dtype)}."
            f" {nearest(dtype, _ITEMSIZE)}"
        )
    return size


@filter_traceback
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
        raise PlacementError(f"{what} must be a size, got {shown(size)}. {_ADVICE}")
    number, unit, binary = match.groups()
    power = _POWERS.index(unit.lower()) + 1 if unit else 0
    return int(Decimal(number) * (1024 if binary else 1000) ** power)


@filter_traceback
def size_text(size: int) -> str:
    """A readable size: "17 B", "4.00 KiB", "2.50 GiB"; right to half a percent."""
    if size < 1024:
        return f"{size} B"
    value, units = size / 1024, list(UNITS[1:])
    while value >= 1023.995 and len(units) > 1:  # what .2f would write as 1024.00
        value /= 1024
        del units[0]
    return f"{value:.2f} {units[0]}"


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
