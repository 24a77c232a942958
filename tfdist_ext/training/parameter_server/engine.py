"""Training under ParameterServerStrategy: this process coordinates, workers run the steps.

The coordinator reads the global batches and sends them with the remote calls, or each worker reads
its own. A sent call that is retried because its worker died uses the same examples. Metrics and the
number of steps come from what the calls return, so each example counts once. Predictions are in
input order.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import keras
import numpy as np
import tensorflow as tf

from tfdist_ext.data import worker_batches
from tfdist_ext.data.batches import Readers
from tfdist_ext.data.epochs import Epoch
from tfdist_ext.data.pipelines import PartsOf, Specs, Structure
from tfdist_ext.data.worker_batches import Answer, WorkerIterators
from tfdist_ext.errors import TrainingError
from tfdist_ext.training._keras_private import raw_value, step_of, step_variables
from tfdist_ext.training._tf_private import busy_workers
from tfdist_ext.training.agreement.task_status import single_task
from tfdist_ext.training.parameter_server.calls import (
    BATCHES_IN_A_CALL,
    Call,
    Calls,
    CoordinatorReduction,
    traced,
)
from tfdist_ext.training.parameter_server.scope import WorkerScope, step_on_worker
from tfdist_ext.training.steps.scope import (
    Execution,
    StepOutputs,
    as_logs,
    metrics_and_others,
    zeros_of,
)
from tfdist_ext.training.variables import default_strategy_scope, optimizers_of
from tfdist_ext.user_frames import warn

# The metrics' states after a step, in one vector, and what the step returned.
StepValues: TypeAlias = tuple[tf.Tensor, dict[str, tf.Tensor]]


class ParameterServerEngine:
    """Steps on the workers of a parameter server cluster, asynchronously.

    Each global batch is one step, on one worker. A step uses the weights as they are when its
    worker reads them.

    Args:
        lazy_updates: as `distribute` takes it.

    Attributes:
        reduction: of the coordinator alone.
        readers: this process, and the workers that may read for themselves.
    """

    def __init__(
        self, strategy: tf.distribute.ParameterServerStrategy, *, lazy_updates: bool = False
    ):
        self._strategy = strategy
        self._lazy_updates = lazy_updates
        servers = getattr(strategy, "servers", None)  # of create_strategy's
        peers = single_task("chief:0", busy_workers, servers)
        self.reduction = CoordinatorReduction(strategy, peers)
        self._calls = Calls(strategy, peers)
        self.readers = Readers(coordinator=self._calls.coordinator, workers=self._calls.workers)

    def feed(self, parts_of: PartsOf, *, eagerly: bool) -> tf.data.Dataset:
        """The input that programs iterate over."""
        del eagerly  # `make_program` warns
        with tf.device("CPU:0"):
            return parts_of(0, 1, 1).prefetch(tf.data.AUTOTUNE)

    def finalize(self, model: keras.Model) -> None:
        """End a training: averaged weights replace the last ones."""
        with default_strategy_scope(), step_on_worker(WorkerScope([]), model):
            model.optimizer.finalize_variable_values(model.trainable_weights)

    def make_predictor(self, model: keras.Model) -> ParameterServerPredictor:
        return ParameterServerPredictor(model, self._calls)

    def make_program(
        self, model: keras.Model, kind: str, *, timed: bool = False
    ) -> ParameterServerProgram:
        """The remote calls of "train" or "test" steps.

        Raises:
            TrainingError: the steps should be timed.
        """
        if timed:
            raise TrainingError(
                "WorkerTensorBoard needs synchronous training. Under"
                f" {type(self._strategy).__name__} workers do not wait for each other, and only the"
                " coordinator runs callbacks. Use keras.callbacks.TensorBoard."
            )
        for name in ("jit_compile", "run_eagerly"):
            if getattr(model, name):
                warn(
                    f"{name}=True is ignored: steps run in graphs on the workers, which use"
                    " variables of the parameter servers."
                )
                setattr(model, name, False)
        return ParameterServerProgram(model, self._calls, kind, lazy_updates=self._lazy_updates)


class ParameterServerProgram:
    """The remote calls of one step of a model.

    The states of all metrics travel in one float64 vector, because each tensor that is sent is a
    call of its own. float64 holds every count below 2**53; float32 loses counts above 16 million.
    """

    traces = "each worker traces it"

    def __init__(self, model: keras.Model, calls: Calls, kind: str, *, lazy_updates: bool):
        self._model = model
        self._calls = calls
        self._lazy_updates = lazy_updates
        self._step = step_of(model, kind)
        self._outputs = StepOutputs(model, kind)
        self._metrics, rest = metrics_and_others(model)
        self._watched = [v for v in rest if not v.trainable]
        self._counter: keras.Variable | None = None
        # Only a worker knows whether the gradients overflow, and the step does not count.
        may_skip = isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
        is_of_keras = isinstance(model.optimizer, keras.optimizers.Optimizer)
        if kind == "train" and is_of_keras and not may_skip:
            self._counter, _ = step_variables(model.optimizer)
        # Other optimizers count in variables on the servers, to which a step adds. A step reads a
        # learning rate once.
        for optimizer in optimizers_of(model).values():
            of_steps = [variable for variable in step_variables(optimizer) if variable is not None]
            self._watched += [variable for variable in of_steps if variable is not self._counter]
        self._counted = 0  # how often a step counts itself
        self._sizes = [int(np.prod(variable.shape)) for variable in self._metrics]
        is_sum = [variable.aggregation == "sum" for variable in self._metrics]
        self._is_sum = np.repeat(np.array(is_sum, bool), self._sizes)
        # Each remote call starts from the states after a reset. They are constants of the traced
        # functions, so they must not depend on the current states, as of an interrupted epoch.
        self._totals = self._states()
        model.reset_metrics()
        self._start = self._states()
        self._assign(self._totals)
        self._specs = [tf.TensorSpec([], tf.int64)]
        self._one = tf.function(self._one_step, autograph=False)
        self._on_batches = tf.function(self._steps, autograph=False)
        self._on_shard: dict[str, tf.types.experimental.ConcreteFunction] = {}  # by a batch's spec

    def reset(self, *, resume: bool = False) -> None:
        """Reset the metrics, as at the beginning of an epoch, or continue from their values."""
        if not resume:
            self._model.reset_metrics()
        self._totals = self._assigned = self._states()

    def _states(self) -> np.ndarray:
        values = [raw_value(v).numpy().ravel().astype(np.float64) for v in self._metrics]
        return np.concatenate([np.zeros(0), *values])

    def _assign(self, states: np.ndarray) -> None:
        for variable, value in zip(self._metrics, self._unpacked(states), strict=True):
            raw_value(variable).assign(value)
        self._assigned = self._states()

    def _unpacked(self, states: np.ndarray | tf.Tensor) -> list[tf.Tensor]:
        """The metrics' states, in their own types and shapes."""
        parts = tf.split(states, [*self._sizes, 0])[:-1]
        return [
            tf.reshape(tf.cast(part, variable.dtype), variable.shape)
            for variable, part in zip(self._metrics, parts, strict=True)
        ]

    def run(
        self, data: Epoch, n: int, seconds: float, *, stop_requested: bool = False
    ) -> Execution:
        """Run `n` steps on the workers, or fewer if the data ends; returns when all are done.

        Raises:
            PeerError: a parameter server is gone.
        """
        if self._states().tobytes() != self._assigned.tobytes():  # a callback has changed a metric
            self.reset(resume=True)
        first = 0 if self._counter is None else int(raw_value(self._counter).numpy())
        iterator, sent = data.iterator, 0

        def arguments(before: int, steps: int) -> tuple[np.int64]:
            nonlocal sent
            sent = max(sent, before + steps)
            return (np.int64(first + before * self._counted),)

        try:
            if isinstance(iterator, WorkerIterators):
                answers = self._on_shards(iterator, n, arguments)
                used = sent = sum(int(answer.steps) for answer in answers)
                results = [answer.values for answer in answers]
            else:
                _, used, results = self._calls.on_batches(
                    self._on_batches, iterator, n, self._specs, arguments
                )
        finally:  # the calls before an error have updated the weights
            with contextlib.suppress(tf.errors.OpError):  # a lost server has an error of its own
                if self._counter is not None and sent:
                    raw_value(self._counter).assign(first + sent * self._counted)
        for states, _ in results:
            self._totals = np.where(self._is_sum, self._totals + states - self._start, states)
        self._assign(self._totals)
        values = zip(self._metrics, self._unpacked(self._totals), strict=True)
        with keras.StatelessScope(values):  # without reading them from servers
            logs = as_logs(self._outputs.results(results[-1][1] if results else {}))
        return Execution(logs, used, seconds, stop_requested=stop_requested)

    def _on_shards(
        self, data: WorkerIterators, n: int, arguments: Callable[[int, int], Sequence[np.int64]]
    ) -> list[Answer]:
        """Take `n` steps, or fewer if all shards end; returns the answers that count."""
        batches, answers = data.batches, []
        if (key := str(batches.batch_spec)) not in self._on_shard:
            steps = functools.partial(self._steps_on_shard, batches.element_spec)
            number, positions = tf.TensorSpec([], tf.int64), tf.TensorSpec([None], tf.int64)
            specs = batches.iterator_spec, positions, number, *self._specs
            self._on_shard[key] = traced(tf.function(steps, autograph=False), *specs)
        done, progress = 0, time.monotonic()
        while done < n and data.unfinished:
            most = max(1, min(BATCHES_IN_A_CALL, (n - done) // (4 * batches.workers)))
            calls: list[Call] = []
            for before in range(done, n, most):
                number = min(most, n - before)
                span = np.int64(number), *arguments(before, number)
                calls.append((self._on_shard[key], (data.of_workers, data.positions, *span)))
            answers += (counted := data.count(self._calls.results(calls)))
            done += sum(int(answer.steps) for answer in counted)
            if counted:
                progress = time.monotonic()
            elif time.monotonic() - progress < worker_batches.PATIENCE:
                time.sleep(0.1)  # the workers that have answered are done with their shards
                self._calls.peers.enters("steps")  # no stall: this wait has a limit of its own
            else:
                data.leave_out()
        return answers

    def _steps_on_shard(
        self,
        spec: Specs,
        iterator: tf.data.Iterator,
        positions: tf.Tensor,
        n: tf.Tensor,
        first: tf.Tensor,
    ) -> Answer:
        """In a graph: `n` steps after the position of the shard, or fewer if the shard ends."""
        start = tf.constant(self._start)
        # Traced beforehand: a loop must know what comes out of it, and how steps count.
        _, outputs = self._one.get_concrete_function(spec, first, start).structured_outputs
        nothing = zeros_of(outputs)

        def step(answer: Answer) -> tuple[Answer]:
            shard, number, batch = iterator.get_next()
            more = batch.has_value()
            is_new = more & (number >= positions[shard])
            step, states = first + answer.steps * self._counted, answer.values[0]
            values = tf.cond(
                is_new,
                lambda: self._one(batch.get_value(), step, states),
                lambda: answer.values,
            )
            end, steps = number + tf.cast(more, tf.int64), answer.steps + tf.cast(is_new, tf.int64)
            return (Answer(shard, end, steps, ~more, values),)

        zero = tf.constant(0, tf.int64)
        (answer,) = tf.while_loop(
            lambda answer: (answer.steps < n) & ~answer.is_done,
            step,
            (Answer(zero, zero, zero, tf.constant(False), (start, nothing)),),
        )
        return answer

    def _steps(self, batches: Sequence[Structure], first: tf.Tensor) -> StepValues:
        """In a graph: steps one after another."""
        values: StepValues = (tf.constant(self._start), {})
        for number, batch in enumerate(batches):
            values = self._one(batch, first + number * self._counted, values[0])
        return values

    def _one_step(self, batch: Structure, step: tf.Tensor, states: tf.Tensor) -> StepValues:
        self._calls.peers.enters("compiling")
        values = list(zip(self._metrics, self._unpacked(states), strict=True))
        if self._counter is not None:
            values.append((self._counter, tf.cast(step, self._counter.dtype)))
        scope = WorkerScope(values, self._watched, self._counter)
        with step_on_worker(scope, self._model, lazy_updates=self._lazy_updates):
            outputs = self._outputs.own_values(self._step(batch), scope, [states], warns=True)
        scope.write_watched()
        self._counted = scope.counted
        after = [tf.cast(scope.get_current_value(v), tf.float64) for v in self._metrics]
        flat = [tf.zeros([0], tf.float64), *(tf.reshape(value, [-1]) for value in after)]
        return tf.concat(flat, axis=0), outputs


class ParameterServerPredictor:
    """The remote calls of a model's predict_step."""

    traces = "each worker traces it"

    def __init__(self, model: keras.Model, calls: Calls):
        self._model = model
        self._calls = calls
        self._step = step_of(model, "predict")
        one = tf.function(self._one_batch, autograph=False)
        self._all_batches = tf.function(lambda batches: [one(x) for x in batches], autograph=False)

    def outputs(self, data: Epoch) -> Iterator[Structure]:
        """Yields the outputs of each global batch; None if all records are damaged."""
        done, at_once = 0, 4 * BATCHES_IN_A_CALL * self._calls.workers
        while data.steps is None or done < data.steps:
            n = at_once if data.steps is None else min(at_once, data.steps - done)
            _, read, calls = self._calls.on_batches(self._all_batches, data.iterator, n)
            outputs = [outputs for of_call in calls for outputs in of_call]
            yield from outputs
            yield from [None] * (read - len(outputs))
            if read < n:
                return
            done += n

    def _one_batch(self, batch: Structure) -> Structure:
        self._calls.peers.enters("compiling")
        with step_on_worker(WorkerScope([]), self._model):
            return self._step(batch)
