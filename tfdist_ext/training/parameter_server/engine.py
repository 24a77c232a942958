"""Training under ParameterServerStrategy: this process coordinates, workers run the steps."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfdist_ext.data.function import FunctionDataset
from tfdist_ext.data.sharded import ShardedDataset
from tfdist_ext.errors import TrainingError
from tfdist_ext.training.agreement.single_task import Reduction, single_task
from tfdist_ext.training.inputs import GlobalBatches
from tfdist_ext.training.parameter_server.calls import Calls, busy_workers
from tfdist_ext.training.parameter_server.program import (
    ParameterServerPredictor,
    ParameterServerProgram,
)
from tfdist_ext.training.parameter_server.scope import WorkerScope, step_on_worker
from tfdist_ext.training.parameter_server.worker_data import WorkerBatches, why_not_remote
from tfdist_ext.training.programs import Engine
from tfdist_ext.training.variables import default_strategy_scope
from tfdist_ext.user_frames import warn

__all__ = ["ParameterServerEngine"]


class ParameterServerEngine(Engine):
    """Steps on the workers of a parameter server cluster, asynchronously.

    Each global batch is one step, on one worker. A step uses the weights as they are when its
    worker reads them.
    """

    state_is_here = False  # the state may not fit into this process

    def __init__(self, strategy: tf.distribute.ParameterServerStrategy):
        servers = getattr(strategy, "servers", None)  # of create_strategy's
        peers = single_task("chief:0", busy_workers, servers)
        # Of the coordinator alone, which reads global batches as they are.
        super().__init__(strategy, Reduction(strategy, peers))
        self._calls = Calls(strategy, peers)

    def _read_sharded(self, data: ShardedDataset, *, from_position: bool) -> GlobalBatches:
        if isinstance(data, FunctionDataset) and not data.takes_epoch:
            why = why_not_remote(data, self._calls.workers)
            if not why:
                return WorkerBatches(self._calls, data)
            warn(
                f"the workers cannot read this data for themselves: {why}. This process reads all"
                " of the data and sends the batches."
            )
        return super()._read_sharded(data, from_position=from_position)

    def keeps_position(self, data: Any) -> bool:
        by_workers = isinstance(data, FunctionDataset) and not data.takes_epoch
        return super().keeps_position(data) and not by_workers

    def feed(self, batches: Any) -> tf.data.Dataset | WorkerBatches:
        if isinstance(batches, WorkerBatches):
            return batches
        with tf.device("CPU:0"):
            return batches.on_host(0, 1, 1)

    def prepare(self, model: keras.Model) -> None:
        for name in ("jit_compile", "run_eagerly"):
            if getattr(model, name):
                warn(
                    f"{name}=True is ignored: steps run in graphs on the workers, which use"
                    " variables of the parameter servers."
                )
                setattr(model, name, False)

    def finalize(self, model: keras.Model) -> None:
        with default_strategy_scope(), step_on_worker(WorkerScope([]), model):
            model.optimizer.finalize_variable_values(model.trainable_weights)

    def _make_program(self, model: keras.Model, kind: str, timed: bool) -> ParameterServerProgram:
        if timed:
            raise TrainingError(
                "WorkerTensorBoard compares workers whose steps wait for each other. Under"
                f" {type(self._strategy).__name__} they do not, and only the coordinator runs"
                " callbacks. Use keras.callbacks.TensorBoard."
            )
        return ParameterServerProgram(model, self._calls, kind)

    def _make_predictor(self, model: keras.Model) -> ParameterServerPredictor:
        return ParameterServerPredictor(model, self._calls)
