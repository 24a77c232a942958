"""The engine of synchronous strategies: all replicas run each step together."""

from __future__ import annotations

from collections.abc import Iterable

import keras
import tensorflow as tf

from tfdist_ext.data.sharded import ShardedDataset
from tfdist_ext.training.agreement.equality import check_equal_positions
from tfdist_ext.training.inputs import GlobalBatches, Parts
from tfdist_ext.training.programs import Engine, PredictProgram, StepProgram, step_of
from tfdist_ext.training.steps.random_numbers import Seeds
from tfdist_ext.training.steps.step_timer import NullStepTimer, StepTimer
from tfdist_ext.training.synchronous.model_step import trace_for_each
from tfdist_ext.training.synchronous.program import Predictor, SynchronousProgram
from tfdist_ext.training.synchronous.reduction import SynchronousReduction
from tfdist_ext.user_frames import warn

__all__ = ["SynchronousEngine"]


class SynchronousEngine(Engine[SynchronousReduction]):
    """Steps on all replicas of a synchronous strategy, each task running its own part."""

    state_is_here = True
    seconds_per_execution = 0.8  # short enough to show progress

    def __init__(self, strategy: tf.distribute.Strategy):
        super().__init__(strategy, SynchronousReduction(strategy))
        # On a TPU steps cannot write what was made outside; they run in the calling thread. So does
        # the one replica of the default strategy, which has no devices.
        on_tpu = isinstance(strategy, tf.distribute.TPUStrategy)
        self._seeds = Seeds([] if on_tpu else self.reduction.devices, self.reduction.from_chief)
        self._timer: StepTimer | None = None

    def _read_sharded(self, data: ShardedDataset, *, from_position: bool) -> GlobalBatches:
        check_equal_positions(self.reduction, data)
        return super()._read_sharded(data, from_position=from_position)

    def feed(self, batches: GlobalBatches) -> Iterable[Parts]:
        """The input that the programs iterate over: the parts of this task's replicas."""
        on = self.reduction
        if on.feeds_on_host:
            return batches.on_host(on.first_replica, on.local_replicas, on.replicas)
        return batches.distributed(self._strategy)

    def prepare(self, model: keras.Model) -> None:
        """Turn off `jit_compile` where XLA does not compile steps."""
        if not model.jit_compile or self._strategy.num_replicas_in_sync == 1:
            return
        if why := trace_for_each(self.reduction, jit_compile=True):
            warn(f"jit_compile=True is off: {why}.")
            model.jit_compile = False

    def step_timer(self) -> StepTimer:
        """The timer of this task's training steps."""
        self._timer = self._timer or StepTimer()
        return self._timer

    def finalize(self, model: keras.Model) -> None:
        """End a training: averaged weights replace the last ones."""
        with self.reduction.peers.barrier("averaged weights"), self._strategy.scope():
            model.optimizer.finalize_variable_values(model.trainable_weights)

    def _make_program(self, model: keras.Model, kind: str, timer: NullStepTimer) -> StepProgram:
        if timer.records and model.jit_compile and not model.run_eagerly:
            warn("jit_compile=True is off: XLA cannot note the times of a WorkerTensorBoard.")
        step = step_of(model, kind)
        return SynchronousProgram(model, self.reduction, kind, step, timer, self._seeds)

    def _make_predictor(self, model: keras.Model) -> PredictProgram:
        return Predictor(model, self.reduction, step_of(model, "predict"), self._seeds)
