"""Arrays in a few numbers that tell whether two are the same, up to the noise of floats."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

__all__ = ["describe_array"]

_RUNS, _RUN = 64, 1 << 12  # of an array with more elements, runs at even distances are taken
_FEW = 4


def describe_array(array: Any) -> dict[str, Any]:
    """Shape, dtype and content as values that `check_equal_across_workers` compares.

    Content is a checksum, and of floats weighted sums, because another processor may round
    differently. Of more than 2**18 elements it is of a sample.
    """
    array = np.asarray(array)
    values = _sample(array.reshape(-1))
    content: dict[str, Any] = {"first": [_plain(value) for value in values[:_FEW]]}
    if array.dtype.kind == "f" or array.dtype.name == "bfloat16":
        numbers = np.nan_to_num(values.astype(np.float64), nan=12345.678, posinf=1e30, neginf=-1e30)
        numbers = np.where(np.abs(numbers) < 1e30, numbers, np.sign(numbers) * 1e30)
        weighted = numbers * (1 + np.arange(numbers.size) % 97 / 97)  # an order counts, too
        starts = np.arange(0, max(numbers.size, 1), max(1, -(-numbers.size // _RUNS)))
        if numbers.size:
            content["sums"] = np.add.reduceat(weighted, starts).tolist()
            content["sizes"] = np.add.reduceat(np.abs(weighted), starts).tolist()
    elif array.dtype.kind in "OSU":
        content["checksum"] = zlib.crc32(b"\0".join(map(_bytes, values)))
    else:
        content["checksum"] = zlib.crc32(np.ascontiguousarray(values).tobytes())
    return {"shape": list(array.shape), "dtype": _dtype(array), "content": content}


def _sample(flat: np.ndarray) -> np.ndarray:
    if flat.size <= _RUNS * _RUN:
        return flat
    starts = np.linspace(0, flat.size - _RUN, _RUNS).astype(np.int64)
    return np.concatenate([flat[start : start + _RUN] for start in starts])


def _dtype(array: np.ndarray) -> str:
    return "string" if array.dtype.kind in "OSU" else array.dtype.name


def _bytes(value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value[:40].decode(errors="replace")
    if isinstance(value, str):
        return value[:40]
    if np.issubdtype(type(value), np.integer) or np.issubdtype(type(value), np.bool_):
        return int(value)
    try:
        return round(float(value), 5)
    except (TypeError, ValueError):
        return str(value)[:40]
