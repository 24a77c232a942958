"""What a variable that is being created is, and the initial values of its pieces."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist_ext.placement.live._keras_private import variable_behind
from tfdist_ext.placement.live.random_rows import rows_drawn_by
from tfdist_ext.placement.specs import VariableSpec

__all__ = ["InitialValue"]

# Each value is the same wherever it stands. A subclass may look at the shape.
_OF_ANY_SHAPE = (keras.initializers.Zeros, keras.initializers.Ones, keras.initializers.Constant)


class InitialValue:
    """The initial value that TensorFlow is given for a variable, and what it says of it.

    Attributes:
        spec: path (its name, if it is not a Keras variable), shape, dtype, and whether it
            is to be trained.
        of_keras: whether Keras says what the variable is.
        given: the initial value, made already where that was needed to know its shape.
    """

    def __init__(self, kwargs: dict[str, Any], *, where: str):
        """
        Args:
            kwargs: what a variable creator is given.
            where: the device on which a value of unknown shape is made.
        """
        self.given = kwargs["initial_value"]
        behind = variable_behind(self.given)
        self.of_keras = behind is not None
        self._initializer: Any = None
        if behind is not None:
            variable, self._initializer = behind
            path, shape, dtype = variable.path, tuple(variable.shape), variable.dtype
        else:
            path = kwargs.get("name") or "Variable"
            shape, dtype = self._look(kwargs, where)
        trainable = kwargs.get("trainable") is not False
        self.spec = VariableSpec(path, shape, dtype, trainable=trainable)
        self._rows: Any = None

    def rows(self, start: int, stop: int) -> Any:
        """These rows; to be called on the device of their piece."""
        initializer, spec = self._initializer, self.spec
        constant = getattr(initializer, "value", 0)
        if type(initializer) in _OF_ANY_SHAPE and np.ndim(constant) == 0:
            return initializer((stop - start, *spec.shape[1:]), dtype=spec.dtype)
        if self._rows is None and initializer is not None:
            self._rows = rows_drawn_by(initializer, spec.shape, spec.dtype)
        if self._rows is not None:
            return self._rows(start, stop)
        if callable(self.given):  # whole on the first piece's device; the others get slices
            self.given = self.given()
        return self.given[start:stop]

    def _look(self, kwargs: dict[str, Any], where: str) -> tuple[tuple[int, ...], str]:
        """Shape and dtype of a variable that is not a Keras variable."""
        dtype, shape = kwargs.get("dtype"), tf.TensorShape(kwargs.get("shape"))
        if callable(self.given) and (dtype is None or not shape.is_fully_defined()):
            with tf.device(where):
                self.given = self.given()
        if not callable(self.given):
            if not isinstance(self.given, np.ndarray | tf.Tensor):
                self.given = tf.convert_to_tensor(self.given, dtype=dtype)
            dtype = dtype or self.given.dtype
            shape = tf.TensorShape(self.given.shape)
        return tuple(shape.as_list()), tf.as_dtype(dtype).name
