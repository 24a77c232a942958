"""predict: every row once, in input order, on every task."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist_ext.data.reading_errors import data_errors_as_raised
from tfdist_ext.training import _keras_private as kp
from tfdist_ext.training import exact
from tfdist_ext.training.epochs import Epoch, Epochs
from tfdist_ext.training.interrupting import keeping_ctrl_c
from tfdist_ext.training.lookups import rows_of_shared
from tfdist_ext.training.own_copies import OwnCopies
from tfdist_ext.training.part import Part, set_part
from tfdist_ext.training.passed import check_lookups
from tfdist_ext.training.protocols import Engine, StepFunction
from tfdist_ext.training.reduction import SynchronousReduction
from tfdist_ext.training.replaced import functions_in_place, step_targets
from tfdist_ext.training.replica_scope import ReplicaScope, assign_written, metrics_and_others

__all__ = ["Predictor", "predict"]


def predict(
    model: keras.Model, engine: Engine, epochs: Epochs, hooks: keras.callbacks.CallbackList
) -> Any:
    """The outputs for one pass over the data, as NumPy arrays of all rows, in input order."""
    model.stop_predicting = False
    hooks.on_predict_begin()
    collected: list[Any] = []
    done = 0  # global batches
    with keeping_ctrl_c() as check_ctrl_c, data_errors_as_raised(), epochs.next() as data:
        each = engine.predictor(model).outputs(data)
        while data.steps is None or done < data.steps:
            hooks.on_predict_batch_begin(done)
            try:
                with engine.reduction.peers.meeting(f"batch {done}"):
                    outputs = next(each)
            except StopIteration:
                break
            check_ctrl_c()
            done += 1
            if outputs is not None:
                collected.append(outputs)
            hooks.on_predict_batch_end(done - 1, {"outputs": outputs})
            if model.stop_predicting:
                break
    if not collected:
        epochs.ended_after(0)
    epochs.is_done(data, done, stopped=bool(model.stop_predicting))
    hooks.on_predict_end()

    def rows(*parts: Any) -> Any:
        if len(parts) == 1 and isinstance(parts[0], np.ndarray):
            return parts[0]  # which Keras would take for a tensor
        return kp.convert_to_np_if_not_ragged(kp.potentially_ragged_concat(list(parts)))

    return keras.tree.map_structure(rows, *collected)


class Predictor:
    """The compiled predict_step of a model.

    A global batch is cut into contiguous parts in replica order, so the parts' outputs, put one
    after another, are in the order of the rows.

    Args:
        step: draws random numbers for the replica that runs it.
    """

    def __init__(
        self,
        model: keras.Model,
        strategy: tf.distribute.Strategy,
        reduction: SynchronousReduction,
        step: StepFunction,
    ) -> None:
        self._model = model
        self._strategy = strategy
        self._reduction = reduction
        self._rows = rows_of_shared(strategy, reduction.local_replicas)
        # Layers may write while they predict: masked kernels, counters, metrics of their own.
        self._metrics, self._watched = metrics_and_others(model)
        self._own = OwnCopies(strategy, reduction.local_replicas)
        self._updated: set[int] = set()  # ids of metric variables that the step writes
        self._step = step
        self._of_batch: Any = self._outputs_of_batch
        self._of_next: Any = self._outputs_of_next
        if not model.run_eagerly:
            self._of_batch = tf.function(self._of_batch, autograph=False, reduce_retracing=True)
            self._of_next = tf.function(self._of_next, autograph=False, reduce_retracing=True)

    def outputs(self, data: Epoch) -> Iterator[Any]:
        """The outputs for each global batch, in order."""
        while True:
            try:
                yield self._next_outputs(data)
            except (StopIteration, tf.errors.OutOfRangeError):
                return

    def _next_outputs(self, data: Epoch) -> Any:
        if data.steps is not None or not self._reduction.multi_worker:
            return self._of_next(data.iterator, data.agreed)
        # gather is a collective: no worker may go on alone.
        batch = data.iterator.get_next_as_optional()
        if self._reduction.any_worker(not bool(batch.has_value())):
            raise StopIteration
        return self._of_batch(batch.get_value(), data.agreed)

    def _outputs_of_next(self, iterator: Any, agreed: bool) -> Any:
        return self._outputs_of_batch(next(iterator), agreed)

    def _outputs_of_batch(self, batch: Any, agreed: bool) -> Any:
        on = self._reduction
        rows_of_all = on.rows_of_all(batch)[0] if agreed else None
        values = [tf.convert_to_tensor(kp.raw_value(variable)) for variable in self._metrics]
        states = on.split_states(self._metrics, values)
        with functions_in_place(step_targets()):
            outputs, new, written = on.run(self._of_one_part, batch, states, rows_of_all)
        assign_written(self._strategy, self._watched, written)
        self._assign_metrics(new)
        return keras.tree.map_structure(self._whole, outputs)

    def _assign_metrics(self, new: Any) -> None:
        """Give the metrics that layers update in their call the states of all replicas."""
        updated = [
            (variable, self._strategy.experimental_local_results(value))
            for variable, value in zip(self._metrics, new, strict=True)
            if id(variable) in self._updated
        ]
        if not updated:
            return
        variables, local = zip(*updated, strict=True)
        states = [list(of_replica) for of_replica in zip(*local, strict=True)]
        values, _, _ = self._reduction.over_all(variables, states, {}, tf.constant(0.0))
        for variable, value in zip(variables, values, strict=True):
            kp.raw_value(variable).assign(value)

    def _of_one_part(self, part: Any, states: Any, rows_of_all: Any = None) -> Any:
        """(outputs, metrics' states, values written) of one replica, in its context."""
        mine = self._reduction.of_this_replica(states)
        rows, of, batch = part
        of = of if rows_of_all is None else rows_of_all
        here = None
        if tf.distribute.has_strategy():
            here = Part(rows, of, self._reduction.replicas, self._reduction.local_replicas, batch)
            here.substitutes = exact.of_part(here, self._rows)
        with (
            set_part(here),
            ReplicaScope(zip(self._metrics, mine, strict=True), self._watched, self._own) as scope,
        ):
            outputs = self._step(batch)
        if here is not None:
            check_lookups(self._model, scope.record(here.called))
        scope.forget_losses(self._model)
        self._updated |= scope.updated
        outputs = keras.tree.map_structure(lambda value: _if_any(rows, value), outputs)
        return outputs, *scope.outcome(here)

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
