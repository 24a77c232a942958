"""predict: every row once, in input order, on every task."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfdist_ext.training import _keras_private as kp
from tfdist_ext.training.epochs import Epochs
from tfdist_ext.training.reduction import Reduction

__all__ = ["predict"]


def predict(
    model: keras.Model,
    strategy: tf.distribute.Strategy,
    reduction: Reduction,
    epochs: Epochs,
    hooks: Any,
) -> Any:
    """The outputs for one pass over the data, as NumPy arrays of all rows.

    A global batch is cut into contiguous parts in replica order, so the parts' outputs, put one
    after another, are in the order of the rows.
    """

    def whole(value: Any) -> Any:
        if reduction.multi_worker:
            return strategy.gather(value, axis=0)
        parts = strategy.experimental_local_results(value)
        return parts[0] if len(parts) == 1 else _concat(parts)

    def one_part(part: Any) -> Any:
        rows, batch = part
        outputs = model.predict_step(batch)
        if reduction.replicas == 1:
            return outputs
        return keras.tree.map_structure(lambda value: _if_any(rows, value), outputs)

    def one_batch(iterator: Any) -> Any:
        outputs = reduction.run(one_part, next(iterator))
        return keras.tree.map_structure(whole, outputs)

    if not model.run_eagerly:
        one_batch = tf.function(one_batch, autograph=False, reduce_retracing=True)

    model.stop_predicting = False
    hooks.on_predict_begin()
    collected: list[Any] = []
    with epochs.next() as data:
        while data.steps is None or len(collected) < data.steps:
            step = len(collected)
            hooks.on_predict_batch_begin(step)
            try:
                outputs = one_batch(data.iterator)
            except (StopIteration, tf.errors.OutOfRangeError):
                break
            collected.append(outputs)
            hooks.on_predict_batch_end(step, {"outputs": outputs})
            if model.stop_predicting:
                break
    if not collected:
        epochs.ended_after(0)
    hooks.on_predict_end()

    def rows(*parts: Any) -> Any:
        return kp.convert_to_np_if_not_ragged(kp.potentially_ragged_concat(list(parts)))

    return keras.tree.map_structure(rows, *collected)


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
