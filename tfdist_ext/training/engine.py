"""What both engines do alike: steps on the replicas of this process, or on workers elsewhere.

`DistributedModel` is the same for both. An engine brings what differs: who agrees with whom, how
data gets to the steps, and the compiled steps themselves.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Generic, TypeVar

import keras
import tensorflow as tf

from tfdist_ext.data.function import FunctionDataset
from tfdist_ext.data.sharded import ShardedDataset
from tfdist_ext.training.function_batches import batches_of_function
from tfdist_ext.training.global_batches import GlobalBatches
from tfdist_ext.training.inputs import read
from tfdist_ext.training.predicting import Predictor
from tfdist_ext.training.protocols import PredictProgram, StepFunction, StepProgram
from tfdist_ext.training.reduction import SynchronousReduction
from tfdist_ext.training.same_data import check_same_position
from tfdist_ext.training.seeds import Seeds
from tfdist_ext.training.step_timer import NullStepTimer, StepTimer
from tfdist_ext.training.steps import SynchronousProgram

__all__ = ["EngineBase", "SynchronousEngine", "step_of"]

_Reduction = TypeVar("_Reduction")


def step_of(model: keras.Model, kind: str) -> StepFunction:
    """The model's "train", "test" or "predict" step."""
    step = getattr(model, f"{kind}_step")
    # A tf.function of the user's would be a graph of its own, where replicas cannot meet.
    function: StepFunction = getattr(step, "python_function", step)
    return function


class EngineBase(ABC, Generic[_Reduction]):
    """The programs of one model, each kept until the model is compiled again."""

    def __init__(self, strategy: tf.distribute.Strategy, reduction: _Reduction):
        self._strategy = strategy
        self.reduction = reduction
        self._programs: dict[tuple[str, bool], tuple[Any, StepProgram]] = {}
        self._predictor: tuple[Any, PredictProgram] | None = None

    def program(self, model: keras.Model, kind: str, timer: NullStepTimer) -> StepProgram:
        """The compiled "train" or "test" steps, made anew when the model was compiled since."""
        compiled = (model.optimizer, model.loss, model.metrics)
        made_for, program = self._programs.get((kind, timer.records), (None, None))
        if program is None or made_for != compiled:
            program = self._make_program(model, kind, timer)
            self._programs[kind, timer.records] = (compiled, program)
        return program

    def predictor(self, model: keras.Model) -> PredictProgram:
        """The compiled predict step."""
        if self._predictor is None or self._predictor[0] != model.run_eagerly:
            self._predictor = model.run_eagerly, self._make_predictor(model)
        return self._predictor[1]

    def keeps_position(self, data: Any) -> bool:
        """Whether `fit` knows at each step where it is in this data."""
        return isinstance(data, ShardedDataset)

    def saves_to(self, folder: Path | None) -> None:
        """Where the checkpoints of a `fit` are, for a message when another task is frozen."""

    @abstractmethod
    def _make_program(self, model: keras.Model, kind: str, timer: NullStepTimer) -> StepProgram: ...

    @abstractmethod
    def _make_predictor(self, model: keras.Model) -> PredictProgram: ...


class SynchronousEngine(EngineBase[SynchronousReduction]):
    """Steps on all replicas of a synchronous strategy, each task running its own part."""

    seconds_per_execution = 0.4  # short enough to show progress

    def __init__(self, strategy: tf.distribute.Strategy):
        super().__init__(strategy, SynchronousReduction(strategy))
        self._seeds = Seeds(strategy, self.reduction)
        self._timer: StepTimer | None = None
        self._warned_of_xla = False

    def read(self, *data: Any, **options: Any) -> GlobalBatches:
        """What `fit`, `evaluate` and `predict` were given, as global batches."""
        if isinstance(data[0], ShardedDataset):
            check_same_position(self.reduction, data[0])
        if isinstance(data[0], FunctionDataset):
            return batches_of_function(data[0], self.reduction, *data[1:], **options)
        return read(*data, **options)

    def feed(self, batches: GlobalBatches) -> Any:
        """What the programs iterate over: the parts of this task's replicas."""
        on = self.reduction
        if on.feeds_on_host:
            return batches.on_host(on.first_replica, on.local_replicas, on.replicas)
        return batches.distributed(self._strategy)

    def prepare(self, model: keras.Model) -> None:
        """Turn off `jit_compile` where XLA does not compile steps."""
        if model.jit_compile and self._strategy.num_replicas_in_sync > 1:
            self._warn_of_xla(
                f"XLA does not compile steps under {type(self._strategy).__name__} with"
                f" {self._strategy.num_replicas_in_sync} replicas."
            )
            model.jit_compile = False

    def step_timer(self) -> StepTimer:
        """The timer of this task's training steps."""
        self._timer = self._timer or StepTimer()
        return self._timer

    def finalize(self, model: keras.Model) -> None:
        """At the end of a training: averaged weights take the place of the last ones."""
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
        step = self._seeds.around(step_of(model, kind))
        return SynchronousProgram(model, self._strategy, self.reduction, kind, step, timer)

    def _make_predictor(self, model: keras.Model) -> PredictProgram:
        step = self._seeds.around(step_of(model, "predict"))
        return Predictor(model, self._strategy, self.reduction, step)
