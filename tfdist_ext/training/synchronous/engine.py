"""The engine of synchronous strategies: all replicas run each step together."""

from __future__ import annotations

from collections.abc import Iterable

import keras
import tensorflow as tf

from tfdist_ext.data.sharded import ShardedDataset
from tfdist_ext.training.agreement.equality import check_equal_positions
from tfdist_ext.training.inputs import GlobalBatches, Parts
from tfdist_ext.training.programs import Engine, PredictProgram, StepProgram
from tfdist_ext.training.steps.random_numbers import Seeds
from tfdist_ext.training.steps.step_timer import StepTimer
from tfdist_ext.training.synchronous.model_step import ModelStep, OneTrace, trace_for_each
from tfdist_ext.training.synchronous.program import Predictor, SynchronousProgram
from tfdist_ext.training.synchronous.reduction import SynchronousReduction
from tfdist_ext.user_frames import warn

__all__ = ["SynchronousEngine"]


class SynchronousEngine(Engine):
    """Steps on all replicas of a synchronous strategy, each task running its own part.

    Args:
        one_trace: as `distribute` takes it.
    """

    reduction: SynchronousReduction
    state_is_here = True

    def __init__(self, strategy: tf.distribute.Strategy, one_trace: OneTrace = "auto"):
        super().__init__(strategy, SynchronousReduction(strategy))
        on = self.reduction
        self._one_trace = one_trace
        why = trace_for_each(on, one_trace, jit_compile=False)
        if why and one_trace is True and on.local_replicas > 1:
            warn(f"one_trace=True is off: {why}.")
        # On a TPU steps cannot write what was made outside; they run in the calling thread. So does
        # the one replica of the default strategy, which has no devices.
        devices = [] if isinstance(strategy, tf.distribute.TPUStrategy) else on.devices
        self._seeds = Seeds(devices, on.from_chief)

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
        if why := trace_for_each(self.reduction, self._one_trace, jit_compile=True):
            warn(f"jit_compile=True is off: {why}.")
            model.jit_compile = False

    def finalize(self, model: keras.Model) -> None:
        """End a training: averaged weights replace the last ones."""
        with self.reduction.peers.barrier("averaged weights"), self._strategy.scope():
            model.optimizer.finalize_variable_values(model.trainable_weights)

    def _make_program(self, model: keras.Model, kind: str, timed: bool) -> StepProgram:
        if timed and model.jit_compile and not model.run_eagerly:
            warn("jit_compile=True is off: XLA cannot note the times of a WorkerTensorBoard.")
        return SynchronousProgram(self._step(model, kind, StepTimer() if timed else None))

    def _make_predictor(self, model: keras.Model) -> PredictProgram:
        return Predictor(self._step(model, "predict"))

    def _step(self, model: keras.Model, kind: str, timer: StepTimer | None = None) -> ModelStep:
        return ModelStep(model, self.reduction, kind, self._seeds, timer, self._one_trace)
