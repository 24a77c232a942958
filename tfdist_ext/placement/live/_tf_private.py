"""The private names of TensorFlow that placement uses, each with the reason."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.distribute.sharded_variable import ShardedVariable
from tensorflow.python.eager import record, tape
from tensorflow.python.ops import resource_variable_ops

__all__ = ["PartitionedVariable", "ServerVariable", "partitioned"]


def partitioned(pieces: Sequence[tf.Variable], name: str) -> Any:
    """One variable of pieces along axis 0, as ParameterServerStrategy makes of a partitioner."""
    return ServerVariable(list(pieces), name=name)


# The number of the piece that is being updated.
_piece: ContextVar[int | None] = ContextVar("piece", default=None)


class ServerVariable(ShardedVariable):
    """A variable in pieces on parameter servers, of which a loop of the user's own is not aware.

    Private because TensorFlow gives its class no public name, and because a tape only follows
    operations: that a variable consists of its pieces has to be recorded as one.

    TensorFlow reads and updates the pieces. A tape watches each piece that is read, but
    `tape.gradient(loss, keras_variable)` asks for the gradient of the variable's `handle`. Here
    that is a handle of the whole shape, which nothing reads. Each tape that sees a read is told
    that the pieces come from it, so that their gradients are put together as its gradient.
    """

    @property
    def trainable(self) -> bool:
        return bool(self._variables[0].trainable)

    @property
    def variables(self) -> list[Any]:
        """The pieces, for who is about to read them."""
        pieces: list[Any] = super().variables
        if self.trainable:
            # Not a record for the open tapes alone: a tf.function remembers this, and repeats it
            # when it is called again, under another tape.
            resource_variable_ops.variable_accessed(self)
        number = _piece.get()
        return pieces if number is None else [pieces[number]]

    @property
    def handle(self) -> Any:
        whole = self._saving_variable
        if self.trainable:
            tape.variable_accessed(whole)  # first: a tape takes records of what it watches
            record.record_operation(
                "PiecesOfVariable",
                [piece.handle for piece in self._variables],
                [whole.handle],
                self._joined_gradient,
            )
        return whole.handle

    @property
    def device(self) -> str:
        """That of the first piece."""
        return str(self._variables[0].device)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.numpy(), dtype)

    @contextlib.contextmanager
    def as_piece(self, number: int) -> Iterator[None]:
        """Scope in which variables in pieces are their pieces of this number."""
        token = _piece.set(number)
        try:
            yield
        finally:
            _piece.reset(token)

    def _joined_gradient(self, *gradients: Any) -> list[Any]:
        """The pieces' gradients as one: of rows, where one of them is, else of the whole shape."""
        if not any(isinstance(each, tf.IndexedSlices) for each in gradients):
            return [tf.concat(gradients, axis=0)]
        slices = [_slices(each) for each in gradients]
        indices = [
            tf.cast(each.indices, tf.int64) + offset[0]
            for each, offset in zip(slices, self._var_offsets, strict=True)
        ]
        return [
            tf.IndexedSlices(
                tf.concat([each.values for each in slices], axis=0),
                tf.concat(indices, axis=0),
                tf.constant(self.shape.as_list(), tf.int64),
            )
        ]

    def _decompose_indices(self, indices: Any) -> tuple[list[Any], Any]:
        # TensorFlow's own knows pieces of equal sizes only.
        firsts = tf.constant([offset[0] for offset in self._var_offsets], indices.dtype)
        owner = tf.searchsorted(firsts, indices, side="right") - 1
        local = indices - tf.gather(firsts, owner)
        return tf.dynamic_partition(local, owner, len(self._variables)), owner


def _of_piece(name: str) -> Any:
    """A method that changes the variable, or the piece that is being updated."""
    of_whole = getattr(ShardedVariable, name)

    def method(self: ServerVariable, *args: Any, **kwargs: Any) -> Any:
        number = _piece.get()
        if number is None:
            return of_whole(self, *args, **kwargs)
        return getattr(self._variables[number], name)(*args, **kwargs)

    return method


for _name in ("assign", "assign_add", "assign_sub"):
    setattr(ServerVariable, _name, _of_piece(_name))
for _name in ("add", "div", "max", "min", "mul", "sub", "update"):
    setattr(ServerVariable, f"scatter_{_name}", _of_piece(f"scatter_{_name}"))


def _slices(gradient: Any) -> tf.IndexedSlices:
    if isinstance(gradient, tf.IndexedSlices):
        return gradient
    return tf.IndexedSlices(gradient, tf.range(tf.shape(gradient)[0]))


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
