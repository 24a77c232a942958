"""What runs the steps of a model: the replicas of this process, or workers elsewhere.

`DistributedModel` is the same for both. An engine brings what differs: who agrees with whom, how
data gets to the steps, and the compiled steps themselves.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from tfdist_ext.data.function import FunctionDataset
from tfdist_ext.data.sharded import ShardedDataset
from tfdist_ext.training.called_back import calls_go_to
from tfdist_ext.training.function_batches import batches_of_function
from tfdist_ext.training.global_batches import GlobalBatches
from tfdist_ext.training.inputs import read
from tfdist_ext.training.predicting import Predictor
from tfdist_ext.training.reduction import Reduction
from tfdist_ext.training.same_data import check_same_position
from tfdist_ext.training.seeds import Seeds
from tfdist_ext.training.steps import StepProgram

__all__ = ["SynchronousEngine"]


class SynchronousEngine:
    """Steps on all replicas of a synchronous strategy, each task running its own part."""

    seconds_per_execution = 0.4  # short enough to show progress

    def __init__(self, strategy: tf.distribute.Strategy):
        self._strategy = strategy
        self.reduction = Reduction(strategy)
        self._seeds = Seeds(strategy, self.reduction)
        self._programs: dict[tuple[str, bool], tuple[Any, Any]] = {}
        self._predictor: Predictor | None = None
        self._warned_of_xla = False

    def saves_to(self, folder: Path | None) -> None:
        """Said by `fit`: where its checkpoints are, for a message when another task is frozen."""

    def read(self, *data: Any, **options: Any) -> GlobalBatches:
        """What `fit`, `evaluate` and `predict` were given, as global batches."""
        if isinstance(data[0], ShardedDataset):
            check_same_position(self.reduction, data[0])
        if isinstance(data[0], FunctionDataset):
            return self._read_by_shard(*data, **options)
        return read(*data, **options)

    def keeps_position(self, data: Any) -> bool:
        """Whether `fit` knows at each step where it is in this data."""
        return isinstance(data, ShardedDataset)

    def _read_by_shard(
        self,
        data: FunctionDataset,
        *beside: Any,
        batch_size: int | None = None,
        class_weight: Any = None,
        seed: Any = None,
        **_: Any,
    ) -> GlobalBatches:
        return batches_of_function(
            data,
            self.reduction,
            beside=beside,
            batch_size=batch_size,
            class_weight=class_weight,
            going_on=seed is not None,
        )

    def feed(self, batches: GlobalBatches) -> Any:
        """What the programs iterate over: the parts of this task's replicas."""
        on = self.reduction
        if on.feeds_on_host:
            return batches.on_host(on.first_replica, on.local_replicas, on.replicas)
        return batches.distributed(self._strategy)

    def prepare(self, model: keras.Model) -> None:
        """Settle what was compiled but cannot be, when the model's variables are there."""
        if model.jit_compile and self._strategy.num_replicas_in_sync > 1:
            self._warn_of_xla(
                f"XLA does not compile steps under {type(self._strategy).__name__} with"
                f" {self._strategy.num_replicas_in_sync} replicas."
            )
            model.jit_compile = False

    def program(self, model: keras.Model, kind: str, *, watched: bool = False) -> Any:
        """The compiled steps ("train" or "test"), made anew when the model was compiled since.

        Args:
            watched: the program has a StepWatch; one without is kept beside it.
        """
        if watched and model.jit_compile and not model.run_eagerly:
            self._warn_of_xla("XLA cannot note the times that a WorkerTensorBoard writes.")
        compiled = (model.optimizer, model.loss, model.metrics)
        made_for, program = self._programs.get((kind, watched), (None, None))
        if program is None or made_for != compiled:
            program = self._make_program(model, kind, watched)
            self._programs[kind, watched] = (compiled, program)
        return program

    def predictor(self, model: keras.Model) -> Any:
        """The compiled predict_step."""
        if self._predictor is None or self._predictor.eager != model.run_eagerly:
            self._predictor = Predictor(model, self._strategy, self.reduction, self._seeds)
        return self._predictor

    def finalize(self, model: keras.Model) -> None:
        """At the end of a training: averaged weights take the place of the last ones."""
        with self.reduction.peers.meeting("averaged weights"), self._strategy.scope():
            model.optimizer.finalize_variable_values(model.trainable_weights)

    def _warn_of_xla(self, why: str) -> None:
        """Say once that `jit_compile=True` is off; to be called by what `fit` calls in a helper."""
        if not self._warned_of_xla:
            warnings.warn(f"jit_compile=True is off: {why}", stacklevel=6)
            self._warned_of_xla = True

    def _make_program(self, model: keras.Model, kind: str, watched: bool) -> Any:
        name = f"{kind}_step"
        with calls_go_to(model, **{name: self._seeds.around(getattr(model, name))}):
            return StepProgram(model, self._strategy, self.reduction, kind, watched=watched)
