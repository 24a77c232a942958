"""Variables that are partitioned into pieces by rows, on parameter servers or on devices.

TensorFlow's ShardedVariable is no tf.Variable: Keras can neither differentiate by it, nor look up
rows of it, nor update its pieces, nor keep an optimizer's slots beside them. What is missing is
here; a step uses it through `WorkerScope` or `ReplicaScope`.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist_ext.placement.live.creating import beside_pieces, is_partitioned, pieces_of
from tfdist_ext.training import _keras_private as kp
from tfdist_ext.training._tf_private import read_by_tapes
from tfdist_ext.training.optimizers import optimizers_of

__all__ = [
    "PartitionedRead",
    "UpdatesVariables",
    "make_readable",
    "slots_beside_pieces",
    "take_rows",
]


class UpdatesVariables(ABC):
    """What an optimizer takes for its strategy; subclasses say where an update runs.

    It has what Keras's optimizer uses of a `tf.distribute.Strategy`.
    """

    @property
    def extended(self) -> UpdatesVariables:
        return self

    def update(
        self,
        var: Any,
        fn: Callable[..., Any],
        args: Any = (),
        kwargs: Any = None,
        group: bool = True,
    ) -> None:
        del group
        self.run(var, functools.partial(fn, **(kwargs or {})), args)

    @abstractmethod
    def run(self, var: Any, fn: Callable[..., Any], args: Sequence[Any]) -> None:
        """Call `fn(variable, *args)` where the variable is, or for each of its pieces."""


def take_rows(value: Any, ids: tf.Tensor) -> tf.Tensor:
    """Rows of a raw value, gathered where its pieces are; of shape ids.shape + one row's.

    No tape sees it: `PartitionedRead` gives the gradient.
    """
    pieces = pieces_of(value)
    flat = tf.reshape(ids, [-1])
    bounds = tf.constant([end for _, _, end in pieces[:-1]], flat.dtype)
    # The piece of an id is the number of pieces that end at or before it.
    owner = tf.searchsorted(bounds, flat, side="right")
    places = tf.dynamic_partition(tf.range(tf.size(flat)), owner, len(pieces))
    wanted = tf.dynamic_partition(flat, owner, len(pieces))
    rows = []
    for (piece, first, _), mine in zip(pieces, wanted, strict=True):
        with tf.device(piece.device):
            rows.append(
                tf.raw_ops.ResourceGather(
                    resource=piece.handle, indices=mine - first, dtype=piece.dtype
                )
            )
    row_shape = value.shape[1:]
    result = tf.reshape(tf.dynamic_stitch(places, rows), [-1, *row_shape])
    result = tf.reshape(result, tf.concat([tf.shape(ids), row_shape.as_list()], axis=0))
    result.set_shape(ids.shape.concatenate(row_shape))
    return result


class PartitionedRead:
    """One partitioned variable as a step reads it: as one tensor, or by rows.

    `tape.gradient` needs one source for all reads. It is a scalar that stands for the variable;
    reads hand their gradients through to it, of the variable's whole shape.
    """

    trainable = True  # what TensorFlow's tapes look for in a variable that is read

    def __init__(self, raw: Any):
        self._raw = raw
        self.handle = tf.zeros([], raw.dtype)
        self.written = False  # by the step
        self.read_whole = False

    def whole(self) -> tf.Tensor:
        """All pieces in one tensor, which has the source as its `handle`, as variables have."""
        self.read_whole = True
        read_by_tapes(self)
        whole = self._made_whole(self.handle)  # anew: another tape must see it, too
        whole.handle = self.handle
        return whole

    def whole_now(self) -> tf.Tensor:
        """The same, read in a graph inside the step's; no gradient goes through it."""
        whole = tf.convert_to_tensor(self._raw)
        whole.handle = self.handle
        return whole

    def rows(self, ids: tf.Tensor) -> tf.Tensor:
        """The rows of `ids`; the gradient is of those rows alone."""
        read_by_tapes(self)

        @tf.custom_gradient
        def take(source: tf.Tensor) -> Any:
            del source

            def gradient(upstream: tf.Tensor) -> tf.IndexedSlices:
                shape = self._raw.shape.as_list()
                values = tf.reshape(upstream, [-1, *shape[1:]])
                return tf.IndexedSlices(values, tf.reshape(ids, [-1]), tf.constant(shape))

            return take_rows(self._raw, ids), gradient

        return take(self.handle)

    def _made_whole(self, source: tf.Tensor) -> tf.Tensor:
        @tf.custom_gradient
        def read(source: tf.Tensor) -> Any:
            del source
            values = []
            for piece, _, _ in pieces_of(self._raw):
                with tf.device(piece.device):
                    values.append(
                        tf.raw_ops.ReadVariableOp(resource=piece.handle, dtype=piece.dtype)
                    )
            whole = tf.ensure_shape(tf.concat(values, axis=0), self._raw.shape)
            return whole, lambda upstream: upstream

        return read(source)


def slots_beside_pieces() -> Any:
    """Scope in which an optimizer's slots of a partitioned variable are partitioned alike.

    To be entered after the strategy's own scope, where that is TensorFlow's own; `create_strategy`
    gives one that knows how.
    """

    def creator(next_creator: Any, **kwargs: Any) -> Any:
        if not is_partitioned(kwargs.get("colocate_with")):
            return next_creator(**kwargs)
        return beside_pieces(next_creator, **kwargs)

    return tf.variable_creator_scope(creator)


def make_readable(model: keras.Model) -> None:
    """Let Keras turn a model's partitioned variables into arrays, as `save` does."""
    variables = list(model.variables)
    for optimizer in optimizers_of(model).values():
        variables += optimizer.variables
    for raw in map(kp.raw_value, variables):
        if is_partitioned(raw) and not hasattr(raw, "__array__"):
            raw.__array__ = _as_array(raw)


def _as_array(raw: Any) -> Any:
    return lambda dtype=None: np.asarray(raw.numpy(), dtype)
