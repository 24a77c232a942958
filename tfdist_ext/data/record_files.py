"""Records of files as examples: what `parse` makes of each record."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_ext.data.position import Fingerprint, fingerprint_of_files
from tfdist_ext.data.records import Records
from tfdist_ext.errors import DataError
from tfdist_ext.messages import shown

__all__ = ["RecordFiles"]

_BLOCK = 16 << 20  # bytes; glibc heeds blocks of up to 32 MiB


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
