"""Steps of a model on the workers of a parameter server cluster, sent there by the coordinator.

The coordinator reads the global batches and sends them with the remote calls. A call that is
retried because its worker died uses the same examples. Metrics and the number of steps come from
what the calls return, so each example counts once. Predictions are in input order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import keras
import numpy as np
import tensorflow as tf

from tfdist_ext.training import _keras_private as kp
from tfdist_ext.training.parameter_server.calls import (
    BATCHES_IN_A_CALL,
    Calls,
    ChunkCalls,
)
from tfdist_ext.training.parameter_server.scope import WorkerScope, step_on_worker
from tfdist_ext.training.parameter_server.worker_data import (
    StepValues,
    WorkerIterators,
    WorkerLoop,
)
from tfdist_ext.training.programs import StepProgram, step_of
from tfdist_ext.training.protocols import Epoch, Execution, Logs, Structure
from tfdist_ext.training.steps.logs import OwnOutputs
from tfdist_ext.training.steps.scope import metrics_and_others
from tfdist_ext.training.variables import optimizers_of

__all__ = ["ParameterServerPredictor", "ParameterServerProgram"]


class ParameterServerProgram(StepProgram):
    """The remote calls of one step of a model.

    The states of all metrics travel in one float64 vector, because each tensor that is sent is a
    call of its own. float64 holds every count below 2**53; float32 loses counts above 16 million.
    """

    traces = "each worker traces it"

    def __init__(self, model: keras.Model, calls: Calls, kind: str):
        self._model = model
        self._calls = calls
        self._step = step_of(model, kind)
        self._own = OwnOutputs(model, kind)
        self._metrics, others = metrics_and_others(model)
        self._updated: set[int] = set()  # ids of metric variables that the step writes
        self._watched = [v for v in others if not v.trainable]
        self._counter: keras.Variable | None = None
        self._rate: keras.Variable | None = None
        if kind == "train" and isinstance(model.optimizer, keras.optimizers.Optimizer):
            self._counter, self._rate = kp.step_variables(model.optimizer)
        # Other optimizers count in variables on the servers, to which a step adds.
        self._watched += [
            kp.step_variables(other)[0]
            for other in optimizers_of(model).values()
            if other is not model.optimizer
        ]
        self._counted = 0  # how often a step counts itself
        self._output_specs: dict[str, tf.TensorSpec] = {}
        self._sizes = [int(np.prod(variable.shape)) for variable in self._metrics]
        is_sum = [variable.aggregation == "sum" for variable in self._metrics]
        self._is_sum = np.repeat(np.array(is_sum, bool), self._sizes)
        self._start = self._reset_states()
        self.reset(resume=True)
        self._one = tf.function(self._one_step, autograph=False)
        rate = "float32" if self._rate is None else self._rate.dtype
        specs = [tf.TensorSpec([], tf.int64), tf.TensorSpec([], rate)]
        self._on_chunks = ChunkCalls(calls, self._steps, *specs)
        self._on_own_data = WorkerLoop(calls, self._one, self._start, specs, lambda: self._counted)

    def reset(self, *, resume: bool = False) -> None:
        """Reset the metrics, as at the beginning of an epoch, or continue from their values."""
        if not resume:
            self._model.reset_metrics()
        self._totals = self._states()

    def _states(self) -> np.ndarray:
        values = [kp.raw_value(v).numpy().ravel().astype(np.float64) for v in self._metrics]
        return np.concatenate([np.zeros(0), *values])

    def _assign(self, states: np.ndarray) -> None:
        for variable, value in zip(self._metrics, self._unpacked(states), strict=True):
            kp.raw_value(variable).assign(value)

    def _unpacked(self, states: np.ndarray | tf.Tensor) -> list[tf.Tensor]:
        """The metrics' states, in their own types and shapes."""
        parts = tf.split(states, [*self._sizes, 0])[:-1]
        return [
            tf.reshape(tf.cast(part, variable.dtype), variable.shape)
            for variable, part in zip(self._metrics, parts, strict=True)
        ]

    def _reset_states(self) -> np.ndarray:
        """The metrics' states after a reset, from which each remote call starts.

        They become constants of the traced functions, so they must not depend on the metrics'
        current values: results of another data set, or of an interrupted epoch.
        """
        before = self._states()
        self._model.reset_metrics()
        start = self._states()
        self._assign(before)
        return start

    def run(
        self, data: Epoch, n: int, seconds: float, *, stop_requested: bool = False
    ) -> Execution:
        """Run `n` steps on the workers, or fewer if the data ends; returns when all are done.

        Raises:
            PeerError: a parameter server is gone.
        """
        first = 0 if self._counter is None else int(kp.raw_value(self._counter).numpy())
        rate = np.float32(0) if self._rate is None else kp.raw_value(self._rate).numpy()
        if isinstance(data.iterator, WorkerIterators):
            answers = self._on_own_data.run(data.iterator, n, first, rate)
            done = used = sum(int(answer.steps) for answer in answers)
            found = [answer.values for answer in answers]
        else:
            many = n // (4 * self._calls.workers) >= BATCHES_IN_A_CALL
            done, used, found = self._on_chunks.run(
                data.iterator,
                n,
                BATCHES_IN_A_CALL if many else 1,
                lambda done: (np.int64(first + done * self._counted), rate),
            )
        for states, _ in found:
            self._totals = np.where(self._is_sum, self._totals + states - self._start, states)
        if self._counter is not None and done:
            kp.raw_value(self._counter).assign(first + done * self._counted)
        self._assign(self._totals)
        logs = self._logs(self._unpacked(self._totals), found[-1][1] if found else {})
        return Execution(logs, used, seconds, stop_requested=stop_requested)

    def _steps(self, batches: Sequence[Structure], first: tf.Tensor, rate: tf.Tensor) -> StepValues:
        """In a graph: steps one after another."""
        values: StepValues = (tf.constant(self._start), {})
        for number, batch in enumerate(batches):
            values = self._one(batch, first + number * self._counted, rate, values[0])
        return values

    def _one_step(
        self, batch: Structure, step: tf.Tensor, rate: tf.Tensor, states: tf.Tensor
    ) -> StepValues:
        self._calls.peers.enters("compiling")
        values = list(zip(self._metrics, self._unpacked(states), strict=True))
        if self._counter is not None:
            values.append((self._counter, tf.cast(step, self._counter.dtype)))
        if self._rate is not None:
            values.append((self._rate, rate))
        scope = WorkerScope(values, self._watched, self._counter)
        with step_on_worker(scope, self._model):
            outputs = self._own.others(self._step(batch), scope, [states], warns=True)
        self._output_specs = {n: tf.TensorSpec(v.shape, v.dtype) for n, v in outputs.items()}
        scope.write_watched()
        self._counted = scope.counted
        self._updated |= scope.updated
        after = [tf.cast(scope.get_current_value(v), tf.float64) for v in self._metrics]
        flat = [tf.zeros([0], tf.float64), *(tf.reshape(value, [-1]) for value in after)]
        return tf.concat(flat, axis=0), outputs

    def _logs(self, values: list[tf.Tensor], outputs: dict[str, np.ndarray]) -> Logs:
        carried = {  # zeros if no worker had a batch left
            name: outputs.get(name, tf.zeros([n or 0 for n in spec.shape], spec.dtype))
            for name, spec in self._output_specs.items()
        }
        with keras.StatelessScope(zip(self._metrics, values, strict=True)):
            found = self._own.results(carried, self._updated)
        logs = {name: value.numpy() for name, value in sorted(found.items())}
        return {name: float(v) if v.ndim == 0 else v for name, v in logs.items()}


class ParameterServerPredictor:
    """The remote calls of a model's predict_step."""

    traces = "each worker traces it"

    def __init__(self, model: keras.Model, calls: Calls):
        self._model = model
        self._calls = calls
        self._step = step_of(model, "predict")
        # Layers may write while they predict: masked kernels, counters.
        self._watched = [v for v in metrics_and_others(model)[1] if not v.trainable]
        self._on_chunks = ChunkCalls(calls, self._batches)

    def outputs(self, data: Epoch) -> Iterator[Structure]:
        """The outputs for each global batch, in order; None if all of its records are damaged."""
        done, at_once = 0, 4 * BATCHES_IN_A_CALL * self._calls.workers
        while data.steps is None or done < data.steps:
            n = at_once if data.steps is None else min(at_once, data.steps - done)
            most = BATCHES_IN_A_CALL if n >= BATCHES_IN_A_CALL * self._calls.workers else 1
            _, read, found = self._on_chunks.run(data.iterator, n, most)
            outputs = [outputs for of_call in found for outputs in of_call]
            yield from outputs
            yield from [None] * (read - len(outputs))
            if read < n:
                return
            done += n

    def _batches(self, batches: Sequence[Structure]) -> list[Structure]:
        one = tf.function(self._one_batch, autograph=False)
        return [one(batch) for batch in batches]

    def _one_batch(self, batch: Structure) -> Structure:
        self._calls.peers.enters("compiling")
        scope = WorkerScope([], self._watched)
        with step_on_worker(scope, self._model):
            outputs = self._step(batch)
        scope.write_watched()
        return outputs
