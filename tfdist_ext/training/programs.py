"""Base classes of the engines, and of the compiled steps that an engine keeps.

`synchronous/` and `parameter_server/` implement them. `DistributedModel` and its loop use only
these base classes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tfdist_ext.data.function import FunctionDataset
from tfdist_ext.data.ordered import OrderedDataset
from tfdist_ext.data.sharded import ShardedDataset
from tfdist_ext.training.agreement.equality import check_equal_positions
from tfdist_ext.training.agreement.single_task import Reduction
from tfdist_ext.training.inputs import Epoch, GlobalBatches, read
from tfdist_ext.training.protocols import Logs, Structure
from tfdist_ext.training.sharded_inputs import (
    batches_of_function,
    batches_of_ordered,
    check_says_nothing_else,
)
from tfdist_ext.training.steps.step_timer import StepTimer
from tfdist_ext.training.variables import check_built

__all__ = [
    "Engine",
    "Execution",
    "StepProgram",
    "compiled_parts",
    "step_of",
]


def step_of(model: keras.Model, kind: str) -> Callable[[Structure], Structure]:
    """The model's "train", "test" or "predict" step."""
    step = getattr(model, f"{kind}_step")
    # Replicas cannot communicate inside the separate graph of a user's tf.function.
    return getattr(step, "python_function", step)


def compiled_parts(model: keras.Model) -> tuple[object, ...]:
    """The objects that `compile` has set. They change when the model is compiled again."""
    return model.optimizer, model.loss, model.metrics


@dataclass(frozen=True)
class Execution:
    """The result of an execution of several steps.

    Attributes:
        logs: over the epoch so far, the same on every worker.
        steps: global batches that were used.
        chief_seconds: how long the execution before this one took on the chief.
        stop_requested: a task received SIGTERM before this execution began.
    """

    logs: Logs
    steps: int
    chief_seconds: float
    stop_requested: bool = False


class StepProgram(ABC):
    """The compiled "train" or "test" steps of one model.

    Attributes:
        timer: records the times of steps; None where nobody asks for them.
    """

    timer: StepTimer | None = None

    @property
    @abstractmethod
    def traces(self) -> str:
        """How the step is traced, in words."""

    @abstractmethod
    def reset(self, *, resume: bool = False) -> None:
        """Reset the metrics, as at the beginning of an epoch, or continue from their values."""

    @abstractmethod
    def run(
        self, data: Epoch, n: int, seconds: float, *, stop_requested: bool = False
    ) -> Execution:
        """Run `n` steps of an epoch, or fewer where its data may end and does.

        Args:
            n: global batches to use.
            seconds: how long this task's last execution took. Every task gets the chief's time
                back, so that all choose the same next `n`.
            stop_requested: this task has received SIGTERM. The result says on every task whether
                any task has.
        """

    def logs_of_this_task(self) -> dict[str, float]:
        """The metrics over this task's own rows; only for steps that have a timer."""
        raise NotImplementedError


class Engine(ABC):
    """Runs a model's steps: on replicas of this process, or on workers elsewhere.

    Programs are kept until the model is compiled again.

    Attributes:
        reduction: over the workers that have to agree.
        state_is_here: whether each task has all variables in its own memory.
    """

    state_is_here: bool

    def __init__(self, strategy: tf.distribute.Strategy, reduction: Reduction):
        self._strategy = strategy
        self.reduction = reduction
        # (kind, timed) -> what the program was compiled for, the program.
        self._programs: dict[tuple[str, bool], tuple[object, Any]] = {}

    def read(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        *,
        seed: Callable[[], int] | None = None,
        **options: Any,
    ) -> GlobalBatches:
        """Read the data of `fit`, `evaluate` or `predict` as global batches; see `inputs.read`.

        Args:
            seed: given for data to train on. Without it, a ShardedDataset is read from its start.
        """
        if not isinstance(x, ShardedDataset):
            replicas = self.reduction.replicas
            return read(x, y, sample_weight, seed=seed, replicas=replicas, **options)
        given = {name: options.get(name) for name in ("class_weight", "batch_size")}
        check_says_nothing_else(x, y=y, sample_weight=sample_weight, **given)
        if self.reduction.multi_worker:
            check_equal_positions(self.reduction, x)
        return self._read_sharded(x, from_position=seed is not None)

    def _read_sharded(self, data: ShardedDataset, *, from_position: bool) -> GlobalBatches:
        if isinstance(data, FunctionDataset):
            return batches_of_function(data, self.reduction, from_position=from_position)
        assert isinstance(data, OrderedDataset)
        return batches_of_ordered(data if from_position else data.in_order())

    @abstractmethod
    def feed(self, batches: Any) -> Any:
        """The input that programs iterate over, made from the result of `read`."""

    @abstractmethod
    def finalize(self, model: keras.Model) -> None:
        """At the end of a training: averaged weights replace the last ones."""

    def program(self, model: keras.Model, kind: str, *, timed: bool = False) -> StepProgram:
        """The "train" or "test" steps, compiled again if the model was compiled again.

        Args:
            timed: the program has a timer.

        Raises:
            TrainingError: an optimizer has no variables, or the steps cannot be timed.
        """
        check_built(model)
        return self._program(model, kind, timed, compiled_parts(model))

    def outputs(self, model: keras.Model, data: Epoch) -> Iterator[Structure]:
        """Returns the outputs for each global batch; None if all rows of a batch are damaged."""
        return self._program(model, "predict", False, model.run_eagerly).outputs(data)

    def _program(self, model: keras.Model, kind: str, timed: bool, made_for: object) -> Any:
        key = kind, timed
        if key not in self._programs or self._programs[key][0] != made_for:
            self._programs[key] = made_for, self._make_program(model, kind, timed)
        return self._programs[key][1]

    def traces(self) -> list[str]:
        """How the steps that have run are traced, one line for each kind."""
        found = {kind: program.traces for (kind, _), (_, program) in self._programs.items()}
        return [f"{kind}: {traces}" for kind, traces in found.items()]

    def keeps_position(self, data: Any) -> bool:
        """Whether `fit` knows at each step where it is in this data."""
        return isinstance(data, ShardedDataset)

    @abstractmethod
    def _make_program(self, model: keras.Model, kind: str, timed: bool) -> Any:
        """A StepProgram; for "predict" an object with `traces`, and with `outputs` of an Epoch."""
