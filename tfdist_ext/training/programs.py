"""What the engines and the compiled steps of both sides have in common.

An engine keeps the programs of a model: its compiled train, test and predict steps. A program
knows the variables of its step, and how the logs come out of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import keras
import tensorflow as tf

from tfdist_ext.data.sharded import ShardedDataset
from tfdist_ext.training.protocols import NullStepTimer, PredictProgram, StepFunction, StepProgram
from tfdist_ext.training.steps.logs import DerivedLogs, MetricVersions, has_own_outputs
from tfdist_ext.training.steps.scope import metrics_and_others
from tfdist_ext.training.variables import check_built
from tfdist_ext.user_frames import warn

if TYPE_CHECKING:
    from tfdist_ext.training.loop import StepsPerExecutionTuner

__all__ = ["EngineBase", "ProgramBase", "compiled_parts", "step_of"]


_Reduction = TypeVar("_Reduction")


def step_of(model: keras.Model, kind: str) -> StepFunction:
    """The model's "train", "test" or "predict" step."""
    step = getattr(model, f"{kind}_step")
    # A tf.function of the user's would be a graph of its own, where replicas cannot meet.
    return getattr(step, "python_function", step)


def compiled_parts(model: keras.Model) -> tuple[object, ...]:
    """What `compile` has set: other objects once the model is compiled again."""
    return model.optimizer, model.loss, model.metrics


class EngineBase(ABC, Generic[_Reduction]):
    """The programs of one model, each kept until the model is compiled again."""

    def __init__(self, strategy: tf.distribute.Strategy, reduction: _Reduction):
        self._strategy = strategy
        self.reduction = reduction
        self._programs: dict[tuple[str, bool], tuple[object, StepProgram]] = {}
        self._predictor: tuple[bool, PredictProgram] | None = None

    def program(self, model: keras.Model, kind: str, timer: NullStepTimer) -> StepProgram:
        """The compiled "train" or "test" steps, made anew when the model was compiled since."""
        compiled = compiled_parts(model)
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

    def traces(self) -> list[str]:
        """How each kind of step that has run is traced, a line each."""
        found = {kind: program.traces for (kind, _), (_, program) in self._programs.items()}
        if self._predictor is not None:
            found["predict"] = self._predictor[1].traces
        return [f"{kind}: {traces}" for kind, traces in found.items()]

    def keeps_position(self, data: Any) -> bool:
        """Whether `fit` knows at each step where it is in this data."""
        return isinstance(data, ShardedDataset)

    def state_is_restored(self) -> None:
        """The model, and the generator of random numbers, have the state of a checkpoint."""

    def saves_to(self, folder: str) -> None:
        """Where the checkpoints of a `fit` are, or "": for a message when a task is frozen."""

    @abstractmethod
    def _make_program(self, model: keras.Model, kind: str, timer: NullStepTimer) -> StepProgram: ...

    @abstractmethod
    def _make_predictor(self, model: keras.Model) -> PredictProgram: ...


class ProgramBase:
    """One step of a model, its variables, and how its logs come out of it.

    Args:
        kind: "train" or "test".
        step: the model's step, to be called with a batch in its scope.
    """

    def __init__(self, model: keras.Model, kind: str, step: StepFunction):
        check_built(model)
        self._model = model
        self._kind = kind
        self._step = step
        self._own_outputs = has_own_outputs(model, kind)
        self._metrics, self._others = metrics_and_others(model)
        self._updated: set[int] = set()  # ids of metric variables that the step writes
        self._derived: DerivedLogs | None = None  # of steps in a graph
        self._mixed: set[str] = set()  # names of logs that were warned of
        self.paces: dict[int, StepsPerExecutionTuner] = {}

    def _derive_logs(
        self,
        logs: dict[str, tf.Tensor],
        versions: MetricVersions,
        final: Mapping[str, int],
        has_mean: Callable[[tf.Tensor], bool],
        *,
        warns: bool = True,
    ) -> DerivedLogs:
        """How a traced step's logs come out of the metrics' states; see `DerivedLogs`."""
        self._derived = DerivedLogs(logs, versions, dict(final), has_mean)
        new = [name for name in self._derived.mixed if name not in self._mixed]
        self._mixed.update(new)
        if new and warns:
            warn(
                f"{type(self._model).__name__}.{self._kind}_step returns"
                f" {', '.join(map(repr, new))}, computed from a metric's result() and from numbers"
                " of single examples, or from a variable in a tf.function of its own. It is the"
                " value of the replicas' own rows. Reduce the numbers to one, or return them and"
                " the metric's result under keys of their own, to log the values over all"
                " examples."
            )
        return self._derived
