"""Makes datasets from arrays, record files, a custom source, or a function of the shard."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist_ext.data.files import files_of
from tfdist_ext.data.function import FunctionDataset
from tfdist_ext.data.ordered import OrderedDataset
from tfdist_ext.data.records import RecordFiles
from tfdist_ext.data.sources import Arrays, Source
from tfdist_ext.errors import DataError
from tfdist_ext.messages import shown
from tfdist_ext.user_frames import filter_traceback

__all__ = ["from_arrays", "from_dataset_fn", "from_source", "from_tfrecords"]


@filter_traceback
def from_source(
    source: Source, *, global_batch_size: int, seed: int | None = None
) -> OrderedDataset:
    """Examples of a custom source, read by their number.

    Args:
        source: an object with the members of `tfdist_ext.data.sources.Source`.
        global_batch_size: examples of one step, over all workers.
        seed: seed of the order; None keeps the order of the numbers.

    Raises:
        DataError: a member is missing, or the source has fewer examples than a batch.
    """
    members = ("__len__", "element_spec", "take", "fingerprint")
    missing = [member for member in members if not hasattr(source, member)]
    if missing:
        raise DataError(
            f"{shown(source)} is not a source of examples: it has no {', '.join(missing)}. See"
            ' "A source of your own" in docs/data.md.'
        )
    return OrderedDataset(source, global_batch_size=global_batch_size, seed=seed)


@filter_traceback
def from_arrays(arrays: Any, *, global_batch_size: int, seed: int | None = None) -> OrderedDataset:
    """Rows of arrays: one array, or a tuple or dict, as (x, y) or (x, y, sample_weight).

    Memory-mapped arrays stay on disk.

    Args:
        arrays: arrays with the same number of rows.
        global_batch_size: examples of one step, over all workers.
        seed: seed of the order; None keeps the order of the rows.

    Raises:
        DataError: arrays of different lengths, no rows, or a batch larger than the data.
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
    """Records of TFRecord files, read by their number.

    An index of the records' offsets is built once, in one pass over the length fields, and kept
    beside each file.

    Args:
        files: one or several patterns or paths of uncompressed files, on any file system that
            `tf.io.gfile` opens. Files are sorted, so that all tasks number records in the same way.
        parse: returns an example, a structure of dense tensors, for a record, a scalar string
            tensor. It is traced.
        global_batch_size: examples of one step, over all workers.
        seed: seed of the order; None keeps the order of the files.
        on_error: "skip" skips damaged records, counts them and warns of each.
        batched: `parse` takes a string tensor of shape [n] for any n, and returns tensors of shape
            [n, ...], as `tf.io.parse_example` does. This is about twice as fast for small records.

    Raises:
        DataError: no such files, a damaged file (the error names file, record and byte), `parse`
            fails, or a batch larger than the data.
    """
    if not callable(parse):
        raise DataError(f"parse must be a function of a record, got {shown(parse)}.")
    source = RecordFiles(files_of(files), parse, on_error=on_error, batched=batched)
    return OrderedDataset(source, global_batch_size=global_batch_size, seed=seed)


@filter_traceback
def from_dataset_fn(
    function: Callable[..., tf.data.Dataset],
    *,
    global_batch_size: int | None = None,
) -> FunctionDataset:
    """A dataset made by a function of the shard, for sources that cannot be read by number.

    In `fit` a shard is a task that reads: each worker, or the only process. Its batches are cut for
    its replicas. Under parameter servers the workers read, and each batch is a step; if the
    function takes `epoch`, calls Python, or uses a dataset made outside, the coordinator reads. The
    function must put each example into one shard, and determines the order.

    Args:
        function: called with `Shard(index, count)`, and with `epoch=` if it has an argument of that
            name. It returns a `tf.data.Dataset` of batches, the shard's part of each global batch,
            of any number and size. Without `epoch`, its dataset is iterated again for each epoch.
        global_batch_size: examples of a step, over all shards. With this number, the function
            returns single examples, and each shard takes its part of the number.

    Raises:
        DataError: the function does not take a shard, or `global_batch_size` is not an integer from
            1. The result of the function is checked when the function is called.
    """
    return FunctionDataset(function, global_batch_size)
