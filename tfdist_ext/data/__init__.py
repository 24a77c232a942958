"""Every example exactly once, in one order, whatever the cluster.

    from tfdist_ext.data import Shard, shard_range

    shard_range(10, Shard(0, 4))              # ShardRange(start=0, stop=2, padding=0)
    shard_files("train-*.tfrecord", shard)    # this shard's files, balanced by bytes

Which example comes when is arithmetic that every task does for itself and with the same result:
`Order` (a permutation for each seed and epoch, computed and not stored), `Shard` (a task's part of
each global batch), `Position` (how far it is, in a few JSON fields). `Records` reads any records of
TFRecord files by an index of their offsets.

Names are looked up when they are first used: the arithmetic does not wait for TensorFlow.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfdist_ext.data.constructors import (
        from_arrays,
        from_dataset_fn,
        from_source,
        from_tfrecords,
    )
    from tfdist_ext.data.files import RecordRange, shard_files
    from tfdist_ext.data.order import Order
    from tfdist_ext.data.position import Position
    from tfdist_ext.data.records import Records
    from tfdist_ext.data.service import through_service
    from tfdist_ext.data.sharded import ShardedDataset
    from tfdist_ext.data.shards import Remainder, Shard, ShardRange, shard_range
    from tfdist_ext.errors import DataError

_HOME = {
    "DataError": "tfdist_ext.errors",
    "Order": "tfdist_ext.data.order",
    "Position": "tfdist_ext.data.position",
    "RecordRange": "tfdist_ext.data.files",
    "ShardedDataset": "tfdist_ext.data.sharded",
    "from_arrays": "tfdist_ext.data.constructors",
    "from_dataset_fn": "tfdist_ext.data.constructors",
    "from_source": "tfdist_ext.data.constructors",
    "from_tfrecords": "tfdist_ext.data.constructors",
    "Records": "tfdist_ext.data.records",
    "Remainder": "tfdist_ext.data.shards",
    "Shard": "tfdist_ext.data.shards",
    "ShardRange": "tfdist_ext.data.shards",
    "shard_files": "tfdist_ext.data.files",
    "shard_range": "tfdist_ext.data.shards",
    "through_service": "tfdist_ext.data.service",
}

__all__ = [  # the same names as in _HOME; a test compares them
    "DataError",
    "Order",
    "Position",
    "RecordRange",
    "Records",
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
    "through_service",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
