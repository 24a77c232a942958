"""Values that must be the same on all workers: compared, and a difference named.

Workers that agree pay for one collective of a few bytes. Only where something differs do the values
themselves travel.
"""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from tfdist_ext.errors import TrainingError
from tfdist_ext.training.protocols import Reduction

__all__ = ["Difference", "check_equal_across_workers", "difference_between_workers"]

Value = Any  # what JSON holds; numbers are equal up to the noise of floats
_RELATIVE, _SHOWN, _MOST = 1e-5, 120, 3


class Difference(NamedTuple):
    """What one worker has and the first one has not.

    Attributes:
        workers: the names of the first worker and of the other.
        values: name -> (value of the first, value of the other), None for what is missing.
    """

    workers: tuple[str, str]
    values: dict[str, tuple[Value, Value]]

    def __str__(self) -> str:
        first, other = self.workers
        parts = []
        for name, (a, b) in list(self.values.items())[:_MOST]:
            got = f"{_short(a)} on {first} and {_short(b)} on {other}"
            if _short(a) == _short(b):
                got = f"other values on {other} than on {first}, after the same first {_short(a)}"
            parts.append(f"{name} must be the same on all workers, got {got}")
        more = len(self.values) - _MOST
        return "; ".join(parts) + (f"; and {more} more differ" if more > 0 else "")


def check_equal_across_workers(
    reduction: Reduction, values: Mapping[str, Value], advice: str
) -> None:
    """Compare values by name; every worker must call.

    Args:
        values: name -> what JSON holds.
        advice: what to do, for the end of the message.

    Raises:
        TrainingError: on every worker, where one's values are not the first worker's.
    """
    if difference := difference_between_workers(reduction, values):
        raise TrainingError(f"{difference}: {advice}")


def difference_between_workers(
    reduction: Reduction, values: Mapping[str, Value]
) -> Difference | None:
    """The values of the first worker that has others than worker 0; every worker must call."""
    if not reduction.multi_worker:
        return None
    text = json.dumps(values, sort_keys=True).encode()
    digest = np.frombuffer(hashlib.blake2b(text, digest_size=16).digest(), np.int32)
    digests = _from_each(reduction, digest)
    different = np.flatnonzero((digests != digests[0]).any(axis=1))
    if not different.size:
        return None
    firsts: Any = None
    for worker in different.tolist():
        if firsts is None:
            firsts = _from_worker(reduction, text, 0)
        others = _from_worker(reduction, text, worker)
        if found := _differing(firsts, others):
            names = reduction.task_names()
            return Difference((names[0], names[worker]), found)
    return None


def _from_each(reduction: Reduction, value: np.ndarray) -> np.ndarray:
    """Each worker's array of one shape, in worker order."""
    table = np.zeros([reduction.workers, *value.shape], value.dtype)
    table[reduction.worker] = value
    return reduction.sum_over_workers(table)


def _from_worker(reduction: Reduction, text: bytes, worker: int) -> dict[str, Value]:
    """The values that a worker has, on every worker."""
    packed = zlib.compress(text) if reduction.worker == worker else b""
    size = int(reduction.sum_over_workers(np.int32(len(packed))))
    words = np.zeros(-(-size // 4), np.int32)  # a dtype that every collective can sum
    words.view(np.uint8)[: len(packed)] = np.frombuffer(packed, np.uint8)
    found = reduction.sum_over_workers(words).view(np.uint8)[:size].tobytes()
    values: dict[str, Value] = json.loads(zlib.decompress(found))
    return values


def _differing(first: Any, other: Any) -> dict[str, tuple[Value, Value]]:
    return {
        name: (first.get(name), other.get(name))
        for name in {**first, **other}
        if (name in first) != (name in other) or not _same(first.get(name), other.get(name))
    }


def _same(a: Value, b: Value) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        if a.keys() == b.keys() == {"first", "sums", "sizes"}:  # see `described_array`
            triples = zip(a["sums"], b["sums"], a["sizes"], strict=False)
            return len(a["sums"]) == len(b["sums"]) and all(
                abs(x - y) <= _RELATIVE * size for x, y, size in triples
            )
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, float) and isinstance(b, float):
        both_nan = math.isnan(a) and math.isnan(b)
        return both_nan or math.isclose(a, b, rel_tol=_RELATIVE, abs_tol=1e-12)
    return type(a) is type(b) and bool(a == b)


def _short(value: Value) -> str:
    if isinstance(value, dict) and "first" in value:
        value = value["first"]
    text = "nothing" if value is None else str(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
