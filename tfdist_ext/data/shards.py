"""Contiguous shards of a range: disjoint, complete, sizes that differ by at most one."""

from __future__ import annotations

from typing import Any

__all__ = ["shard_range"]


def shard_range(n: Any, index: Any, count: Any) -> tuple[Any, Any]:
    """The half-open range [start, stop) of shard `index` of `count` in `n` rows.

    Works on Python integers and on integer tensors alike, because the formula has no branches:
    the same line cuts a batch inside a tf.data pipeline and in a table test.
    """
    return n * index // count, n * (index + 1) // count
