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

from tfdist_ext.errors import DataError

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
    from tfdist_ext.data.sharded import ShardedDataset
    from tfdist_ext.data.shards import Remainder, Shard, ShardRange, shard_range

# Where a name is looked for, in this order: the first does not wait for TensorFlow.
_MODULES = ["shards", "order", "position", "sharded", "files", "records", "constructors"]

__all__ = [
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
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    modules = (import_module(f"{__name__}.{module}") for module in _MODULES)
    value = next(getattr(module, name) for module in modules if name in module.__all__)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
