"""The private names of TensorFlow that placement uses, each with the reason."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.distribute.sharded_variable import ShardedVariable

__all__ = ["PartitionedVariable", "partitioned"]


def partitioned(pieces: Sequence[tf.Variable], name: str) -> Any:
    """One variable of pieces along axis 0, as ParameterServerStrategy makes of a partitioner.

    Private because TensorFlow gives the class no public name.
    """
    return ShardedVariable(list(pieces), name=name)


class PartitionedVariable(ShardedVariable):
    """A variable in pieces along axis 0, each of which all replicas of a strategy share.

    Private as above. TensorFlow's class is no tf.Variable: what Keras asks one for and it has not,
    is here, or said to be missing.

    Attributes:
        path: what messages call it.
        why: in words, what has cut it.
    """

    def __init__(self, pieces: Sequence[Any], name: str, path: str):
        super().__init__(list(pieces), name=name)
        self.path, self.why = path, "create(in_pieces=True)"
        plain = [piece.get() for piece in pieces]
        self._plain = ShardedVariable(plain, name=name)

    def get(self) -> ShardedVariable:
        """The same of plain pieces, which no strategy looks after."""
        return self._plain

    @property
    def handle(self) -> Any:
        # An AttributeError, as there is none: TensorFlow asks with hasattr.
        raise AttributeError(
            f"{self.path!r} has no gradient of its own: {self.why} has cut it into"
            f" {len(self._variables)} pieces. Train with tfdist_ext.distribute(build, strategy)"
            " instead of Keras's own fit; in a loop of your own, differentiate by its pieces,"
            " variable.variables."
        )

    @property
    def device(self) -> str:
        """That of the first piece; a checkpoint of a Keras model is written from there."""
        return str(self._variables[0].device)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.numpy(), dtype)
