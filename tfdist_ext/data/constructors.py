"""How data is made: from arrays, record files, a custom source, or a function of the shard."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist_ext.data.files import files_of
from tfdist_ext.data.function import FunctionDataset
from tfdist_ext.data.ordered import OrderedDataset
from tfdist_ext.data.record_files import RecordFiles
from tfdist_ext.data.records import Records
from tfdist_ext.data.sources import Arrays, Lookup
from tfdist_ext.errors import DataError
from tfdist_ext.messages import shown
from tfdist_ext.user_frames import filter_traceback

__all__ = ["from_arrays", "from_dataset_fn", "from_source", "from_tfrecords"]


@filter_traceback
def from_source(source: Any, *, global_batch_size: int, seed: int | None = None) -> OrderedDataset:
    """Examples of whatever has a length and gives them by number.

    Args:
        source: `len(source)` and `source[numbers]`, which gives a batch of arrays for int64 numbers
            of shape [n] (`tfdist_ext.data.sources.Lookup`); or a `tfdist_ext.data.sources.Source`,
            whose `take` works in graphs.
        global_batch_size: examples of one step, over all workers.
        seed: of the order; None keeps that of the numbers.

    Raises:
        DataError: it is no source, has no examples, or fewer than a batch.
    """
    if not hasattr(source, "take") or not hasattr(source, "element_spec"):
        source = Lookup(source)
    return OrderedDataset(source, global_batch_size=global_batch_size, seed=seed)


@filter_traceback
def from_arrays(arrays: Any, *, global_batch_size: int, seed: int | None = None) -> OrderedDataset:
    """Rows of arrays: one, or a tuple or dict of them, as (x, y) or (x, y, sample_weight).

    Memory-mapped arrays stay on disk.

    Args:
        arrays: the same number of rows each.
        global_batch_size: examples of one step, over all workers.
        seed: of the order; None keeps that of the rows.

    Raises:
        DataError: arrays of different lengths, no rows, a batch larger than the data.
    """
    return OrderedDataset(Arrays(arrays), global_batch_size=global_batch_size, seed=seed)


@filter_traceback
def from_tfrecords(
    files: str | Sequence[str],
    parse: Callable[[tf.Tensor], Any],
    *,
    global_batch_size: int,
    seed: int | None = None,
    on_error: str = "raise",
    batched: bool = False,
) -> OrderedDataset:
    """Records of TFRecord files, each read by its place in the file.

    An index of the places is built once, in one pass over the records' length fields, and kept
    beside the data.

    Args:
        files: patterns or paths, one or several; sorted, so that all tasks number alike.
        parse: (record, a scalar string tensor) -> the example, a structure of tensors; traced.
        global_batch_size: examples of one step, over all workers.
        seed: of the order; None keeps that of the files.
        on_error: "skip" skips damaged records, which are counted and named in warnings.
        batched: `parse` takes many records at a time, a string tensor of shape [n], and returns
            tensors of shape [n, ...], as `tf.io.parse_example` does: about twice as fast where
            records are small. n is any number, those of a part of a batch.

    Raises:
        DataError: no such files, a damaged one (file, record and byte are named), a batch larger
            than the data.
    """
    if not callable(parse):
        raise DataError(f"parse must be a function of a record, got {shown(parse)}.")
    source = RecordFiles(Records(files_of(files), on_error=on_error), parse, batched)
    return OrderedDataset(source, global_batch_size=global_batch_size, seed=seed)


@filter_traceback
def from_dataset_fn(
    function: Callable[..., tf.data.Dataset],
    *,
    global_batch_size: int | None = None,
) -> FunctionDataset:
    """A dataset made by a function of the shard, for sources that cannot be read by number.

    In `fit` each task that reads is a shard: one of several workers, or the only process there is,
    whose batches are then cut for its replicas. Under parameter servers the workers read, and each
    batch is a step of its own; where they cannot (the function has `epoch`, calls Python, or uses a
    data set made outside of it), the coordinator reads. What the shard's examples are is the
    function's business: that each example is in one shard, and in which order.

    Args:
        function: called with `Shard(index, count)`, and with `epoch=` where it has an argument of
            that name. It returns a `tf.data.Dataset` of batches, the shard's part of each global
            batch, of any number and size. Without `epoch`, its data set is iterated anew for each
            epoch.
        global_batch_size: examples of a step, over all shards; the function's data set has single
            examples then. Each shard takes its part of this number.

    Raises:
        DataError: it is no function, it does not take a shard, or the global batch is no number
            from 1. What it returns is checked when it is called.
    """
    return FunctionDataset(function, global_batch_size)
