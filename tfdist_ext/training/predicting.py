"""predict: every row once, in input order, on every task."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfdist_ext.data.reading_errors import data_errors_as_raised
from tfdist_ext.training import _keras_private as kp
from tfdist_ext.training.epochs import Epoch, Epochs
from tfdist_ext.training.interrupting import keeping_ctrl_c
from tfdist_ext.training.lookups import rows_of_shared
from tfdist_ext.training.reduction import Reduction
from tfdist_ext.training.seeds import Seeds

__all__ = ["Predictor"]


class Predictor:
    """The compiled predict_step of a model.

    A global batch is cut into contiguous parts in replica order, so the parts' outputs, put one
    after another, are in the order of the rows.
    """

    def __init__(
        self,
        model: keras.Model,
        strategy: tf.distribute.Strategy,
        reduction: Reduction,
        seeds: Seeds,
    ) -> None:
        self._model = model
        self._strategy = strategy
        self._reduction = reduction
        self._rows = rows_of_shared(strategy, reduction.local_replicas)
        self._step = seeds.around(model.predict_step)
        self.eager = model.run_eagerly
        self._of_batch: Any = self._outputs_of_batch
        self._of_next: Any = self._outputs_of_next
        if not self.eager:
            self._of_batch = tf.function(self._of_batch, autograph=False, reduce_retracing=True)
            self._of_next = tf.function(self._of_next, autograph=False, reduce_retracing=True)

    def predict(self, epochs: Epochs, hooks: Any) -> Any:
        """The outputs for one pass over the data, as NumPy arrays of all rows."""
        model = self._model
        model.stop_predicting = False
        hooks.on_predict_begin()
        collected: list[Any] = []
        with keeping_ctrl_c() as check_ctrl_c, data_errors_as_raised(), epochs.next() as data:
            while data.steps is None or len(collected) < data.steps:
                step = len(collected)
                hooks.on_predict_batch_begin(step)
                try:
                    outputs = self._next_outputs(data)
                except (StopIteration, tf.errors.OutOfRangeError):
                    break
                check_ctrl_c()
                collected.append(outputs)
                hooks.on_predict_batch_end(step, {"outputs": outputs})
                if model.stop_predicting:
                    break
        if not collected:
            epochs.ended_after(0)
        epochs.is_done(data, len(collected), stopped=bool(model.stop_predicting))
        hooks.on_predict_end()

        def rows(*parts: Any) -> Any:
            return kp.convert_to_np_if_not_ragged(kp.potentially_ragged_concat(list(parts)))

        return keras.tree.map_structure(rows, *collected)

    def _next_outputs(self, data: Epoch) -> Any:
        if data.steps is not None or not self._reduction.multi_worker:
            return self._of_next(data.iterator)
        # gather is a collective: no worker may go on alone.
        batch = data.iterator.get_next_as_optional()
        if self._reduction.any_worker(not bool(batch.has_value())):
            raise StopIteration
        return self._of_batch(batch.get_value())

    def _outputs_of_next(self, iterator: Any) -> Any:
        return self._outputs_of_batch(next(iterator))

    def _outputs_of_batch(self, batch: Any) -> Any:
        with kp.rows_taken_by(self._rows):
            outputs = self._reduction.run(self._of_one_part, batch)
        return keras.tree.map_structure(self._whole, outputs)

    def _of_one_part(self, part: Any) -> Any:
        rows, _, batch = part
        outputs = self._step(batch)
        return keras.tree.map_structure(lambda value: _if_any(rows, value), outputs)

    def _whole(self, value: Any) -> Any:
        if self._reduction.multi_worker:
            return self._strategy.gather(value, axis=0)
        parts = self._strategy.experimental_local_results(value)
        return parts[0] if len(parts) == 1 else _concat(parts)


def _if_any(rows: tf.Tensor, value: Any) -> Any:
    """The outputs, or none where the replica only ran on a row that is another's."""
    if isinstance(value, tf.SparseTensor) or value.shape.rank == 0:
        return value
    length = value.nrows() if isinstance(value, tf.RaggedTensor) else tf.shape(value)[0]
    return value[: tf.where(rows > 0, length, tf.zeros_like(length))]


def _concat(parts: tuple[Any, ...]) -> Any:
    if isinstance(parts[0], tf.SparseTensor):
        return tf.sparse.concat(axis=0, sp_inputs=list(parts))
    return tf.concat(parts, axis=0)
