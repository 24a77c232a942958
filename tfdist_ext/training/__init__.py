"""A Keras model trained through a strategy: Keras's signatures, TensorFlow's runtime."""

from tfdist_ext.training.callbacks.worker_tensorboard import WorkerTensorBoard
from tfdist_ext.training.checkpoints.folder import finished_checkpoints, training_is_done
from tfdist_ext.training.model import DistributedModel, distribute
from tfdist_ext.training.steps.context import all_rows

__all__ = [
    "DistributedModel",
    "WorkerTensorBoard",
    "all_rows",
    "distribute",
    "finished_checkpoints",
    "training_is_done",
]
