"""The private names of TensorFlow that training uses, each with the reason."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from tensorflow.python.distribute.cross_device_utils import CollectiveReplicaLauncher
from tensorflow.python.eager import tape

__all__ = ["keys_of_turn", "read_by_tapes"]

_COLLECTIVES = 1 << 16  # of one function at most; its keys are consecutive


@contextlib.contextmanager
def keys_of_turn(turn: Any) -> Iterator[None]:
    """Scope in which collectives have other instance keys in each turn of a loop in the graph.

    Private because a strategy does not let its keys be chosen. Each call of a function gets new
    keys, and all turns of a loop in it the same ones; what is gathered under a key must have one
    shape, and a worker's slices of a gradient have not: the last batch is smaller.

    Args:
        turn: the number of the turn, a scalar int32 tensor.
    """
    original = CollectiveReplicaLauncher._next_instance_key

    def next_key(launcher: Any) -> Any:
        # The original remembers the method, to call it again when the function is called.
        CollectiveReplicaLauncher._next_instance_key = original
        try:
            return original(launcher) + turn * _COLLECTIVES
        finally:
            CollectiveReplicaLauncher._next_instance_key = next_key

    CollectiveReplicaLauncher._next_instance_key = next_key
    try:
        yield
    finally:
        CollectiveReplicaLauncher._next_instance_key = original


def read_by_tapes(stand_in: Any) -> None:
    """Let open gradient tapes watch the `handle` of what stands in for a trainable variable.

    Private because only a tf.Variable is watched without the user's word.
    """
    tape.variable_accessed(stand_in)
