"""Datasets that give each worker its part of the data.

    from tfdist_ext.data import Shard, shard_files, shard_range

    shard_range(10, Shard(0, 4))              # ShardRange(start=0, stop=2, padding=0)
    shard_files("train-*.tfrecord", shard)    # this shard's files, balanced by bytes

`from_arrays`, `from_tfrecords`, `from_source` and `from_dataset_fn` create a `ShardedDataset` for
`fit`. Each example is used once per epoch. The order of the first three depends only on the seed
and the epoch, and not on the number of workers. The reading position can be saved as JSON.
"""

from __future__ import annotations

from tfdist_ext.data.function import from_dataset_fn
from tfdist_ext.data.ordered import from_arrays, from_source
from tfdist_ext.data.records import from_tfrecords
from tfdist_ext.data.sharded import ShardedDataset
from tfdist_ext.data.shards import Remainder, Shard, ShardRange, shard_files, shard_range
from tfdist_ext.errors import DataError

__all__ = [
    "DataError",
    "Remainder",
    "Shard",
    "ShardRange",
    "ShardedDataset",
    "from_arrays",
    "from_dataset_fn",
    "from_source",
    "from_tfrecords",
    "shard_files",
    "shard_range",
]
