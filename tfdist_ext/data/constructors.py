"""How data is made: from arrays, record files, a custom source, or a function of the shard."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_ext.data.files import files_of
from tfdist_ext.data.function import FunctionDataset
from tfdist_ext.data.ordered import OrderedDataset
from tfdist_ext.data.position import Fingerprint, fingerprint_of_files
from tfdist_ext.data.records import Records
from tfdist_ext.data.sources import Arrays, Lookup
from tfdist_ext.deprecation import renamed_arguments
from tfdist_ext.errors import DataError
from tfdist_ext.messages import shown

__all__ = ["from_arrays", "from_dataset_fn", "from_source", "from_tfrecords"]

_BLOCK = 16 << 20  # bytes; glibc heeds blocks of up to 32 MiB
_OLD_NAMES = renamed_arguments({"global_batch": "global_batch_size"})


@_OLD_NAMES
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


@_OLD_NAMES
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


@_OLD_NAMES
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


@_OLD_NAMES
def from_dataset_fn(
    function: Callable[..., tf.data.Dataset],
    *,
    global_batch_size: int | None = None,
    service: str | bool | None = None,
    job_name: str | None = None,
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
        service: have a tf.data service prepare the batches: "grpc://host:port" of its dispatcher,
            or True for that of `tfdist run --data-workers N`. The function is called for all of the
            data, and each batch goes to the first task that asks (`through_service`
            says what is guaranteed). There is no order, so a training can resume from the end of an
            epoch only; under parameter servers the coordinator reads.
        job_name: as in `through_service`.

    Raises:
        DataError: it is no function, it does not take a shard, or the global batch is no number
            from 1. What it returns is checked when it is called.
    """
    return FunctionDataset(function, global_batch_size, service, job_name)


class RecordFiles:
    """Records of TFRecord files, made examples by `parse`.

    Args:
        records: of files, in the order in which they are numbered.
        parse: (one record, a scalar string tensor) -> the example, a structure of tensors; traced.
        batched: `parse` takes many records, a string tensor of shape [n], and each tensor that it
            returns has a row for each of them.

    Raises:
        DataError: no records, or `parse` fails or returns tensors without rows.
    """

    def __init__(self, records: Records, parse: Callable[[tf.Tensor], Any], batched: bool):
        if len(records) == 0:
            raise DataError(
                f"the files must have at least 1 record, got none in {shown(records.files)}."
            )
        self.records = records
        self.loses_examples = self.records.skips  # `take` may give fewer than it was asked for
        self._parse = parse
        self._batched = batched
        _keep_freed_memory()
        try:
            traced = tf.function(parse, autograph=True).get_concrete_function(
                tf.TensorSpec([None] if batched else [], tf.string)
            )
        except (TypeError, ValueError, tf.errors.OpError) as error:
            many = "many records" if batched else "a record"
            raise DataError(f"parse fails when it is traced for {many}: {error}") from error
        self._spec = tf.nest.map_structure(
            _row_spec if batched else _example_spec, traced.structured_outputs
        )
        self.element_spec = tf.nest.map_structure(
            lambda spec: tf.TensorSpec(tf.TensorShape([None]).concatenate(spec.shape), spec.dtype),
            self._spec,
        )

    def __len__(self) -> int:
        return len(self.records)

    def take(self, indices: tf.Tensor) -> Any:
        payloads = tf.numpy_function(self._payloads, [indices], tf.string, stateful=False)
        payloads.set_shape([None])
        if not self._batched:
            return tf.map_fn(self._parse, payloads, fn_output_signature=self._spec)
        # Few operations give what parse expects of no records: decode_raw has rows of 0 bytes.
        return tf.cond(tf.size(payloads) > 0, lambda: self._rows(payloads), self._no_rows)

    def _rows(self, payloads: tf.Tensor) -> Any:
        """The output of `parse` for many records, checked to have a row for each."""

        def checked(output: tf.Tensor) -> tf.Tensor:
            message = "parse with batched=True must return a row for each record, got more or fewer"
            rows = tf.debugging.assert_equal(tf.shape(output)[0], tf.size(payloads), message)
            with tf.control_dependencies([rows]):
                return tf.identity(output)

        return tf.nest.map_structure(checked, self._parse(payloads))

    def _no_rows(self) -> Any:
        return tf.nest.map_structure(
            lambda spec: tf.zeros([0, *(size or 0 for size in spec.shape.as_list())], spec.dtype),
            self._spec,
        )

    def fingerprint(self) -> Fingerprint:
        indexes = self.records.indexes
        return fingerprint_of_files(
            self.records.files,
            [index.stamp for index in indexes],
            [index.records for index in indexes],
            [index.content() for index in indexes],
        )

    def _payloads(self, indices: np.ndarray) -> np.ndarray:
        found = self.records.read_array(indices)
        # None stands for a damaged record.
        return found[[one is not None for one in found]] if self.records.skipped else found


def _keep_freed_memory() -> None:
    """Have the C library keep some of what a batch gives back, for the next one.

    At first glibc returns the end of its heap to the system as soon as 128 KiB there are free, and
    each page of each batch is faulted in anew: half of the time of reading large records. When a
    block that was mapped by itself is freed, it raises that limit to twice the block (mallopt(3),
    M_MMAP_THRESHOLD). The block is never written to, so it costs nothing. Other C libraries do
    not mind.
    """
    bytes(_BLOCK)


def _example_spec(output: Any) -> tf.TensorSpec:
    if not isinstance(output, tf.Tensor | tf.TensorSpec):
        raise DataError(
            f"parse must return dense tensors, which can be batched, got {shown(output)}. Make it"
            " dense: tf.sparse.to_dense(...), or .to_tensor(shape=...) of a ragged one."
        )
    return tf.TensorSpec(output.shape, output.dtype)


def _row_spec(output: Any) -> tf.TensorSpec:
    """The spec of one row of the output of `parse` for many records."""
    # A structure's leaf may be anything; sparse tensors and ragged ones have no rows to cut.
    dense = isinstance(output, tf.Tensor | tf.TensorSpec) and output.shape.rank is not None
    if not dense or output.shape.rank == 0 or output.shape[0] is not None:
        raise DataError(
            "parse with batched=True must return dense tensors with a row for each record, of shape"
            f" [n, ...] where n is not known when it is traced, got {shown(output)}."
        )
    return tf.TensorSpec(output.shape[1:], output.dtype)
