"""Which examples belong to whom: pure arithmetic, the same for every task."""

from tfdist_ext.data.shards import shard_range

__all__ = ["shard_range"]
