"""The engine of synchronous strategies: all replicas run each step together.

Random numbers without a seed (`keras.random.normal(shape)` in a layer's call) are drawn by Keras
from one generator of the calling thread, which it would make in the thread of each replica,
inside of the step. So each replica has one from the beginning: a plain variable of its
own that its steps advance, alike on all replicas of all workers.
"""

from __future__ import annotations

import functools
import random
import warnings
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import keras
import tensorflow as tf

from tfdist_ext.data.function import FunctionDataset
from tfdist_ext.data.sharded import ShardedDataset
from tfdist_ext.strategies.traced_replica import copy_number
from tfdist_ext.training import _keras_private as kp
from tfdist_ext.training.agreement.equality import check_equal_positions
from tfdist_ext.training.inputs import GlobalBatches, Parts, batches_of_function, read
from tfdist_ext.training.programs import EngineBase, step_of
from tfdist_ext.training.protocols import (
    NullStepTimer,
    PredictProgram,
    StepFunction,
    StepProgram,
    Structure,
)
from tfdist_ext.training.steps.step_timer import StepTimer
from tfdist_ext.training.synchronous.program import Predictor, SynchronousProgram
from tfdist_ext.training.synchronous.reduction import SynchronousReduction, trace_for_each

__all__ = ["SynchronousEngine"]


class SynchronousEngine(EngineBase[SynchronousReduction]):
    """Steps on all replicas of a synchronous strategy, each task running its own part."""

    seconds_per_execution = 0.8  # short enough to show progress

    def __init__(self, strategy: tf.distribute.Strategy):
        super().__init__(strategy, SynchronousReduction(strategy))
        self._generators: list[keras.random.SeedGenerator] | None = None
        self._timer: StepTimer | None = None
        self._warned_of_xla = False

    def read(self, *data: Any, **options: Any) -> GlobalBatches:
        """Read the data of `fit`, `evaluate` or `predict` as global batches."""
        if isinstance(data[0], ShardedDataset):
            check_equal_positions(self.reduction, data[0])
        if isinstance(data[0], FunctionDataset):
            return batches_of_function(data[0], self.reduction, *data[1:], **options)
        return read(*data, **options)

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
            self._warn_of_xla(f"{why}.")
            model.jit_compile = False

    def step_timer(self) -> StepTimer:
        """The timer of this task's training steps."""
        self._timer = self._timer or StepTimer()
        return self._timer

    def finalize(self, model: keras.Model) -> None:
        """End a training: averaged weights replace the last ones."""
        with self.reduction.peers.meeting("averaged weights"), self._strategy.scope():
            model.optimizer.finalize_variable_values(model.trainable_weights)

    def program(self, model: keras.Model, kind: str, timer: NullStepTimer) -> StepProgram:
        if timer.records and model.jit_compile and not model.run_eagerly:
            self._warn_of_xla("XLA cannot note the times that a WorkerTensorBoard writes.")
        return super().program(model, kind, timer)

    def _warn_of_xla(self, why: str) -> None:
        """Say once that `jit_compile=True` is off; to be called by what `fit` calls in a helper."""
        if not self._warned_of_xla:
            warnings.warn(f"jit_compile=True is off: {why}", stacklevel=6)
            self._warned_of_xla = True

    def _make_program(self, model: keras.Model, kind: str, timer: NullStepTimer) -> StepProgram:
        step = self._seeded(step_of(model, kind))
        generators = self._generators or ()
        return SynchronousProgram(model, self.reduction, kind, step, timer, generators)

    def _make_predictor(self, model: keras.Model) -> PredictProgram:
        step = self._seeded(step_of(model, "predict"))
        return Predictor(model, self.reduction, step, self._generators or ())

    def _seeded(self, step: StepFunction) -> StepFunction:
        """The same step, drawing from the generator of the replica that runs it.

        Every worker must call, where it may be the first time.
        """
        if self._generators is None:
            self._generators = self._new_generators()
        if not (generators := self._generators):
            return step

        @functools.wraps(step)
        def seeded(*args: Structure) -> Structure:
            number = copy_number() % len(generators)
            with kp.global_seed_generator(generators[number]):
                return step(*args)

        return seeded

    def _new_generators(self) -> list[keras.random.SeedGenerator]:
        """The generators of this worker's replicas; none where Keras's own is used."""
        # On a TPU steps cannot write what was made outside; they run in the calling thread. So does
        # the one replica of the default strategy, which has no devices.
        on_tpu = isinstance(self._strategy, tf.distribute.TPUStrategy)
        if on_tpu or not self.reduction.devices:
            return []
        # From Python's random numbers, as Keras takes seeds.
        seed = int(self.reduction.from_chief(random.randint(1, 2**31 - 1)))

        def generator(device: str) -> keras.random.SeedGenerator:
            with tf.device(device):
                return keras.random.SeedGenerator(seed)

        # A new thread is outside of all scopes and graphs that are open in this one.
        with ThreadPoolExecutor(1) as thread:
            return list(thread.map(generator, self.reduction.devices))
