"""A Keras model trained through a strategy: Keras's signatures, TensorFlow's runtime."""

from tfdist_ext.training.model import DistributedModel, distribute

__all__ = ["DistributedModel", "distribute"]
