"""predict on the workers of a parameter server cluster: every row once, in input order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist_ext.training.coordinated.batches import Parcel, batch_of, parcels, specs_of
from tfdist_ext.training.coordinated.calls import Calls, on_worker
from tfdist_ext.training.coordinated.scope import WorkerScope
from tfdist_ext.training.coordinated.steps import BATCHES_IN_A_CALL
from tfdist_ext.training.epochs import Epoch
from tfdist_ext.training.protocols import StepFunction
from tfdist_ext.training.replaced import functions_in_place, step_targets, substitutes
from tfdist_ext.training.replica_scope import metrics_and_others

__all__ = ["CoordinatedPredictor"]


class CoordinatedPredictor:
    """The remote calls of a model's predict_step."""

    def __init__(self, model: keras.Model, calls: Calls, step: StepFunction):
        self._model = model
        self._calls = calls
        self._step = step
        # Layers may write while they predict: masked kernels, counters.
        self._watched = [v for v in metrics_and_others(model)[1] if not v.trainable]
        self._functions: dict[Any, Any] = {}

    def outputs(self, data: Epoch) -> Iterator[Any]:
        """The outputs for each global batch, in order; None for one without a row that is whole."""
        done = 0
        turn = self._calls.workers  # a short one first: it shows early that all is well
        while data.steps is None or done < data.steps:
            n = turn if data.steps is None else min(turn, data.steps - done)
            outputs, read = self._outputs(data.iterator, n)
            done += read
            yield from outputs
            yield from [None] * (read - len(outputs))
            if read < n:
                return
            turn = 4 * BATCHES_IN_A_CALL * self._calls.workers

    def _outputs(self, iterator: Any, n: int) -> tuple[list[Any], int]:
        """(outputs, batches read) of the next `n` global batches, or of fewer where data ends."""
        read = 0
        with self._calls.all_done() as call:
            most = BATCHES_IN_A_CALL if n >= BATCHES_IN_A_CALL * self._calls.workers else 1
            for parcel in parcels(iterator, n, most):
                read += max(1, len(parcel.ends))
                if parcel.ends:
                    call(self._function(iterator, parcel), [parcel.tensors, parcel.ends])
        return [outputs for of_call in call.results() for outputs in of_call], read

    def _function(self, iterator: Any, parcel: Parcel) -> Any:
        structure, specs = specs_of(iterator)
        count = len(parcel.ends)
        key = (count, str(specs))
        if key not in self._functions:
            one = tf.function(self._one_batch, autograph=False)

            def batches(tensors: Any, ends: Any) -> list[Any]:
                return [
                    one(batch_of(structure, tensors, ends, number, count))
                    for number in range(count)
                ]

            self._functions[key] = on_worker(batches, specs, tf.TensorSpec([count], tf.int64))
        return self._functions[key]

    def _one_batch(self, batch: Any) -> Any:
        scope = WorkerScope([], self._watched)
        with scope, functions_in_place(step_targets()), substitutes(scope.substitutes):
            outputs = self._step(batch)
        scope.write_watched()
        return outputs
