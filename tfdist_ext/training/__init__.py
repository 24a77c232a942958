"""A Keras model trained through a strategy: Keras's signatures, TensorFlow's runtime."""

from tfdist_ext.training.distributing import distribute
from tfdist_ext.training.gathering import all_rows
from tfdist_ext.training.model import DistributedModel
from tfdist_ext.training.worker_tensorboard import WorkerTensorBoard

__all__ = ["DistributedModel", "WorkerTensorBoard", "all_rows", "distribute"]
