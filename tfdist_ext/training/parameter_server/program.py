"""Steps of a model on the workers of a parameter server cluster, sent there by the coordinator.

The coordinator reads the global batches and sends them with the remote calls. A call that is
retried because its worker died uses the same examples. Metrics and the number of steps come from
what the calls return, so each example counts once. Predictions are in input order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import keras
import numpy as np
import tensorflow as tf

from tfdist_ext.training import _keras_private as kp
from tfdist_ext.training.parameter_server.calls import (
    BATCHES_IN_A_CALL,
    Calls,
    ConcreteFunction,
    batch_chunks,
    chunk_specs,
    on_worker,
    unstacked,
)
from tfdist_ext.training.parameter_server.scope import WorkerScope, step_on_worker
from tfdist_ext.training.parameter_server.worker_data import (
    StepValues,
    WorkerIterators,
    WorkerLoop,
    packed,
    unpacked,
)
from tfdist_ext.training.programs import StepProgram
from tfdist_ext.training.protocols import (
    BatchIterator,
    Epoch,
    Execution,
    Logs,
    StepFunction,
    Structure,
)
from tfdist_ext.training.steps.logs import results
from tfdist_ext.training.steps.replaced import StepRecord, check_lookups
from tfdist_ext.training.steps.scope import metrics_and_others
from tfdist_ext.training.variables import optimizers_of

__all__ = ["ParameterServerPredictor", "ParameterServerProgram"]

# By the number of batches in a chunk, and the specs of its tensors.
Functions: TypeAlias = dict[tuple[int, str], ConcreteFunction]


class ParameterServerProgram(StepProgram):
    """The remote calls of one step of a model."""

    traces = "each worker traces it"

    def __init__(self, model: keras.Model, calls: Calls, kind: str, step: StepFunction):
        super().__init__(model, kind, step)
        self._calls = calls
        self._training = kind == "train"
        self._watched = [v for v in self._others if not v.trainable]
        self._counter: keras.Variable | None = None
        self._rate: keras.Variable | None = None
        if isinstance(model.optimizer, keras.optimizers.Optimizer):
            self._counter, self._rate = kp.step_variables(model.optimizer)
        # Other optimizers count in variables on the servers, to which a step adds.
        self._watched += [
            kp.step_variables(other)[0]
            for other in optimizers_of(model).values()
            if other is not model.optimizer
        ]
        self._counted = 0  # how often a step counts itself
        self._output_specs: dict[str, tf.TensorSpec] = {}
        self._functions: Functions = {}
        self._start = self._reset_values()
        self.reset(resume=True)
        rate = "float32" if self._rate is None else self._rate.dtype
        self._number_and_rate = [tf.TensorSpec([], tf.int64), tf.TensorSpec([], rate)]
        self._on_own_data = WorkerLoop(
            calls,
            tf.function(self._one_step, autograph=False),
            self._start,
            [variable.aggregation == "sum" for variable in self._metrics],
            self._number_and_rate,
            lambda: self._counted,
        )

    def reset(self, *, resume: bool = False) -> None:
        """Reset the metrics, as at the beginning of an epoch, or continue from their values."""
        if not resume:
            self._model.reset_metrics()
        # Float32 loses counts above 16 million, and digits of sums long before.
        self._totals = [_wide(kp.raw_value(variable).numpy()) for variable in self._metrics]

    def _reset_values(self) -> list[np.ndarray]:
        """The metrics' states after a reset, from which each remote call starts.

        They become constants of the traced functions, so they must not depend on the metrics'
        current values: results of another data set, or of an interrupted epoch.
        """
        raw_values = [kp.raw_value(variable) for variable in self._metrics]
        before = [raw.numpy() for raw in raw_values]
        self._model.reset_metrics()
        start = [raw.numpy() for raw in raw_values]
        for raw, value in zip(raw_values, before, strict=True):
            raw.assign(value)
        return start

    def run(self, data: Epoch, n: int, seconds: float, *, told: bool = False) -> Execution:
        """Run `n` steps on the workers, or fewer if the data ends; returns when all are done.

        Raises:
            PeerError: a parameter server is gone.
        """
        first = 0 if self._counter is None else int(kp.raw_value(self._counter).numpy())
        rate = np.float32(0) if self._rate is None else kp.raw_value(self._rate).numpy()
        passed_over = 0
        if isinstance(data.iterator, WorkerIterators):
            done, states, outputs = self._on_own_data.run(data.iterator, n, first, rate)
        else:
            done, passed_over, states, outputs = self._run_on_chunks(data.iterator, n, first, rate)
        for each in states:
            self._add(each)
        if self._training and self._counter is not None and done:
            kp.raw_value(self._counter).assign(first + done * self._counted)
        values = [  # over the epoch, in the metrics' own types
            tf.constant(value.astype(start.dtype))
            for value, start in zip(self._totals, self._start, strict=True)
        ]
        for variable, value in zip(self._metrics, values, strict=True):
            kp.raw_value(variable).assign(value)
        return Execution(self._logs(values, outputs), done + passed_over, seconds, told=told)

    def _run_on_chunks(
        self, iterator: BatchIterator, n: int, first: int, rate: np.floating
    ) -> tuple[int, int, list[list[np.ndarray]], dict[str, np.ndarray]]:
        """(steps done, batches without rows, metrics' states of each call, the last outputs)."""
        done = passed_over = 0
        with self._calls.joined() as call:
            together = n // (4 * self._calls.workers) >= BATCHES_IN_A_CALL
            for chunk in batch_chunks(iterator, n, BATCHES_IN_A_CALL if together else 1):
                if not chunk.batches:
                    passed_over += 1
                    continue
                function = _function(
                    self._functions, iterator, chunk.batches, self._steps, *self._number_and_rate
                )
                call(function, chunk.tensors, np.int64(first + done * self._counted), rate)
                done += chunk.batches
        found = list(call.results())
        states = [unpacked(vector, self._start) for vector, _ in found]
        return done, passed_over, states, found[-1][1] if found else {}

    def _steps(
        self, batches: Sequence[Structure], first: tf.Tensor, rate: tf.Tensor
    ) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
        """In a graph: steps one after another, their metrics' states in one vector."""
        one = tf.function(self._one_step, autograph=False)
        states: list[tf.Tensor] = [tf.constant(value) for value in self._start]
        outputs: dict[str, tf.Tensor] = {}
        for number, batch in enumerate(batches):
            states, outputs = one(batch, first + number * self._counted, rate, states)
        return packed(states), outputs

    def _one_step(
        self, batch: Structure, step: tf.Tensor, rate: tf.Tensor, states: Sequence[tf.Tensor]
    ) -> StepValues:
        self._calls.peers.enters("compiling")
        values = list(zip(self._metrics, states, strict=True))
        if self._training and self._counter is not None:
            values.append((self._counter, tf.cast(step, self._counter.dtype)))
        if self._rate is not None:
            values.append((self._rate, rate))
        scope = WorkerScope(values, self._watched, self._counter)
        with step_on_worker(scope, self._model) as called:
            outputs = self._other_outputs(self._step(batch), scope, states, warns=True)
        check_lookups(self._model, StepRecord(called, read_whole=scope.read_whole))
        self._output_specs = {n: tf.TensorSpec(v.shape, v.dtype) for n, v in outputs.items()}
        scope.write_watched()
        self._counted = scope.counted
        self._updated |= scope.updated
        states = [scope.get_current_value(variable) for variable in self._metrics]
        return states, outputs

    def _add(self, states: Sequence[np.ndarray]) -> None:
        """Add the metrics' states of steps that began with `_start` to those of the epoch."""
        for i, (variable, start) in enumerate(zip(self._metrics, self._start, strict=True)):
            if variable.aggregation == "sum":
                self._totals[i] = self._totals[i] + (states[i] - start)
            else:
                self._totals[i] = states[i]

    def _logs(self, values: list[tf.Tensor], outputs: dict[str, np.ndarray]) -> Logs:
        carried = {  # zeros if no worker had a batch left
            name: outputs.get(name, tf.zeros([n or 0 for n in spec.shape], spec.dtype))
            for name, spec in self._output_specs.items()
        }
        with keras.StatelessScope(zip(self._metrics, values, strict=True)):
            found = results(self._model, carried, self._metric_logs, self._updated)
        logs = {name: value.numpy() for name, value in sorted(found.items())}
        return {name: float(v) if v.ndim == 0 else v for name, v in logs.items()}


def _wide(value: np.ndarray) -> np.ndarray:
    return value.astype(np.float64) if value.dtype.kind == "f" else value


class ParameterServerPredictor:
    """The remote calls of a model's predict_step."""

    traces = "each worker traces it"

    def __init__(self, model: keras.Model, calls: Calls, step: StepFunction):
        self._model = model
        self._calls = calls
        self._step = step
        # Layers may write while they predict: masked kernels, counters.
        self._watched = [v for v in metrics_and_others(model)[1] if not v.trainable]
        self._functions: Functions = {}

    def outputs(self, data: Epoch) -> Iterator[Structure]:
        """The outputs for each global batch, in order; None if all of its records are damaged."""
        done, at_once = 0, 4 * BATCHES_IN_A_CALL * self._calls.workers
        while data.steps is None or done < data.steps:
            n = at_once if data.steps is None else min(at_once, data.steps - done)
            most = BATCHES_IN_A_CALL if n >= BATCHES_IN_A_CALL * self._calls.workers else 1
            read = 0
            with self._calls.joined() as call:
                for chunk in batch_chunks(data.iterator, n, most):
                    read += max(1, chunk.batches)
                    if chunk.batches:
                        functions, iterator = self._functions, data.iterator
                        function = _function(functions, iterator, chunk.batches, self._batches)
                        call(function, chunk.tensors)
            outputs = [outputs for of_call in call.results() for outputs in of_call]
            yield from outputs
            yield from [None] * (read - len(outputs))
            if read < n:
                return
            done += read

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


def _function(
    functions: Functions,
    iterator: BatchIterator,
    count: int,
    of_batches: Callable[..., Structure],
    *specs: tf.TensorSpec,
) -> ConcreteFunction:
    """`of_batches(batches, *args)` for chunks of `count` batches; `specs` are those of `args`."""
    structure, of_tensors = chunk_specs(iterator, count)
    key = (count, str(of_tensors))
    if key not in functions:

        def of_chunk(tensors: list[tf.Tensor], *args: tf.Tensor) -> Structure:
            return of_batches(unstacked(structure, tensors, count), *args)

        functions[key] = on_worker(of_chunk, of_tensors, *specs)
    return functions[key]
