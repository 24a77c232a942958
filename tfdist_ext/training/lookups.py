"""Lookups of rows in a variable of which all replicas share one copy: rows move, not the table.

Keras turns a table into a tensor before it takes rows of it, and so sends all of it to the device
of each replica. Here the rows are gathered where the table is, or its pieces.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist_ext.placement.live.creating import is_partitioned
from tfdist_ext.training import _keras_private as kp
from tfdist_ext.training.copies import copies_per_worker, local_copy
from tfdist_ext.training.partitioned import take_rows
from tfdist_ext.training.replica_scope import ReplicaScope

__all__ = ["rows_of_shared", "taken_by"]


def rows_of_shared(strategy: tf.distribute.Strategy, local_replicas: int) -> Callable[..., Any]:
    """What stands in for `keras.ops.take` of a table's rows.

    Keras's way remains that of a variable with a copy for each replica, of one that the step has
    given another value, and of sparse ids.
    """

    def rows(variable: Any, ids: Any) -> Any:
        if isinstance(ids, tf.SparseTensor) or not is_shared(variable):
            return None
        if isinstance(ids, tf.RaggedTensor):
            flat = rows(variable, ids.flat_values)
            return None if flat is None else ids.with_flat_values(flat)
        ids = tf.convert_to_tensor(ids)
        ids = tf.where(ids < 0, ids + tf.cast(variable.shape[0], ids.dtype), ids)
        if is_partitioned(kp.raw_value(variable)):
            taken = of_pieces(variable, ids)
        else:
            taken = tf.gather(local_copy(variable, strategy, 0), ids)
        if taken is None:
            return None
        return tf.cast(taken, variable.dtype)  # the layer's compute type, where it casts

    def of_pieces(variable: Any, ids: tf.Tensor) -> Any:
        scope = kp.stateless_scope()
        if isinstance(scope, ReplicaScope):
            return scope.rows(variable, ids)
        return take_rows(kp.raw_value(variable), ids)

    def is_shared(variable: Any) -> bool:
        raw = kp.raw_value(variable)
        if raw is None or raw.shape.rank < 1 or local_replicas == 1:
            return False
        if copies_per_worker(variable, strategy) == local_replicas:
            return False
        scope = kp.stateless_scope()
        if scope is None:
            return True
        if isinstance(scope, ReplicaScope) and is_partitioned(raw):
            return True  # it is asked for the rows
        return isinstance(scope, ReplicaScope) and scope.get_current_value(variable) is raw

    return functools.partial(taken_by, rows)


def taken_by(
    rows: Callable[[Any, Any], Any],
    original: Callable[..., Any],
    x: Any,
    indices: Any,
    axis: int | None = None,
) -> Any:
    """`keras.ops.take`, by `rows(variable, ids)` where that gives what is asked for."""
    taken = rows(x, indices) if axis == 0 and isinstance(x, keras.Variable) else None
    return original(x, indices, axis=axis) if taken is None else taken
