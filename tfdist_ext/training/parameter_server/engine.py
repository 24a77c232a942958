"""Training under ParameterServerStrategy: this process coordinates, workers run the steps."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, NoReturn

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tfdist_ext.data.function import FunctionDataset
from tfdist_ext.data.sharded import ShardedDataset
from tfdist_ext.errors import TrainingError
from tfdist_ext.training.agreement.barriers import SingleTask
from tfdist_ext.training.agreement.stalls import Phases, watch
from tfdist_ext.training.inputs import GlobalBatches
from tfdist_ext.training.parameter_server.calls import Calls, busy_workers
from tfdist_ext.training.parameter_server.program import (
    ParameterServerPredictor,
    ParameterServerProgram,
)
from tfdist_ext.training.parameter_server.scope import WorkerScope, updates_on_servers
from tfdist_ext.training.parameter_server.worker_data import WorkerBatches, why_not_remote
from tfdist_ext.training.programs import Engine, step_of
from tfdist_ext.training.protocols import TaskStatus
from tfdist_ext.training.steps.step_timer import NullStepTimer
from tfdist_ext.training.variables import default_strategy_scope
from tfdist_ext.user_frames import warn

__all__ = ["CoordinatorReduction", "ParameterServerEngine"]


class CoordinatorReduction:
    """The one task that drives the training: it agrees with itself, and is the chief."""

    is_chief = True
    multi_worker = False
    replicas = local_replicas = 1  # of global batches, which are read here as they are
    first_replica = worker = 0
    workers = 1

    def __init__(self, strategy: tf.distribute.ParameterServerStrategy) -> None:
        self.strategy = strategy
        phases = Phases.of_environment()
        if phases is not None:
            made_by_us = {}
            if (watcher := getattr(strategy, "watcher", None)) is not None:
                made_by_us = {"tell_others": strategy.tell_stalled, "heartbeat": watcher.heartbeat}
            watch("chief:0", phases, busy_workers, **made_by_us)
        self.peers: TaskStatus = SingleTask(phases)

    def call(self, name: str) -> AbstractContextManager[None]:
        return self.peers.call(name)

    def task_names(self) -> list[str]:
        return ["the chief"]

    def any_worker(self, flag: bool) -> bool:
        return bool(flag)

    def from_chief(self, value: npt.ArrayLike) -> np.ndarray:
        return np.asarray(value)

    sum_over_workers = from_chief


class ParameterServerEngine(Engine[CoordinatorReduction]):
    """Steps on the workers of a parameter server cluster, asynchronously.

    Each global batch is one step, on one worker. A step starts from whatever the weights are when
    its worker reads them.
    """

    state_is_here = False  # it may not fit
    seconds_per_execution = 1.0  # at its end workers wait for the slowest one

    def __init__(self, strategy: tf.distribute.ParameterServerStrategy):
        super().__init__(strategy, CoordinatorReduction(strategy))
        self._calls = Calls(strategy, self.reduction.peers)

    def saves_to(self, folder: str) -> None:
        watcher = getattr(self._strategy, "watcher", None)  # of create_strategy's
        if watcher is not None:
            watcher.checkpoints_in(folder)

    def _read_sharded(self, data: ShardedDataset, *, from_position: bool) -> GlobalBatches:
        if isinstance(data, FunctionDataset):
            why = why_not_remote(data, self._calls.workers)
            if not why:
                return WorkerBatches(self._calls, data)
            if not data.takes_epoch:
                warn(
                    f"the workers cannot read this data for themselves: {why}. This process reads"
                    " all of it, and hands out the batches."
                )
        return super()._read_sharded(data, from_position=from_position)

    def keeps_position(self, data: Any) -> bool:
        if isinstance(data, FunctionDataset) and not why_not_remote(data, self._calls.workers):
            return False  # the workers read it
        return super().keeps_position(data)

    def feed(self, batches: Any) -> tf.data.Dataset | WorkerBatches:
        if isinstance(batches, WorkerBatches):
            return batches
        with tf.device("CPU:0"):
            return batches.on_host(0, 1, 1)

    def prepare(self, model: keras.Model) -> None:
        for name in ("jit_compile", "run_eagerly"):
            if getattr(model, name):
                warn(
                    f"{name}=True is off: steps run in the workers' processes, in graphs that"
                    " reach over to the parameter servers."
                )
                setattr(model, name, False)

    def step_timer(self) -> NoReturn:
        raise TrainingError(
            "WorkerTensorBoard must be used where the steps of workers wait for each other, got"
            f" {type(self._strategy).__name__}, where they do not and the coordinator alone runs"
            " callbacks. keras.callbacks.TensorBoard writes there what the model has learned."
        )

    def finalize(self, model: keras.Model) -> None:
        with default_strategy_scope(), updates_on_servers(WorkerScope([]), model):
            model.optimizer.finalize_variable_values(model.trainable_weights)

    def _make_program(
        self, model: keras.Model, kind: str, timer: NullStepTimer
    ) -> ParameterServerProgram:
        del timer  # of steps that wait for each other
        return ParameterServerProgram(model, self._calls, kind, step_of(model, kind))

    def _make_predictor(self, model: keras.Model) -> ParameterServerPredictor:
        return ParameterServerPredictor(model, self._calls, step_of(model, "predict"))
