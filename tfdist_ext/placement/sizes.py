"""Bytes: how many a value of each dtype takes, and how people read and write them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal

import ml_dtypes  # noqa: F401  # adds bfloat16 and others to NumPy
import numpy as np

from tfdist_ext.errors import PlacementError
from tfdist_ext.messages import shown
from tfdist_ext.user_frames import filter_traceback

__all__ = ["UNITS", "columns", "itemsize", "parse_size", "size_text"]

UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_SIZE = re.compile(r"\s*([0-9]{1,19}(?:\.[0-9]{1,9})?)\s*(?:([kmgtp]?)(i?)b)?\s*", re.IGNORECASE)
_POWERS = "kmgtp"
_ADVICE = 'Write bytes as a whole number, or a text such as "8GiB" (2**30) or "500MB" (10**6).'


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
            f"a dtype must be a name of TensorFlow's, as float32, got {shown(dtype)}."
        ) from None


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
    power = min(max(size.bit_length() - 1, 0) // 10, len(UNITS) - 1)
    return f"{size / 1024**power:.2f} {UNITS[power]}" if power else f"{size} B"


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
