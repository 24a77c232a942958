"""The private names of TensorFlow that training uses, each with the reason."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from tensorflow.python.distribute.cross_device_utils import CollectiveReplicaLauncher
from tensorflow.python.eager import context, tape
from tensorflow.python.framework import errors

__all__ = [
    "abort_collectives",
    "get_value",
    "has_coordination_service",
    "insert_value",
    "keys_of_turn",
    "peer_status",
    "read_by_tapes",
    "replace_value",
]

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


def has_coordination_service() -> bool:
    """Whether this process is in a cluster whose tasks share a key-value store.

    Private because MultiWorkerMirroredStrategy starts the coordination service and shows it
    nowhere. It is the one channel between workers that works while a collective waits.
    """
    return context.context().coordination_service is not None


def insert_value(key: str, value: str) -> bool:
    """Insert into the store of the coordination service; False where the key exists.

    Private as `has_coordination_service` is. Takes half a millisecond.

    Raises:
        tf.errors.OpError: the task that keeps the store does not answer.
    """
    try:
        context.context().set_config_key_value(key, value)
    except errors.AlreadyExistsError:
        return False
    return True


def replace_value(key: str, value: str) -> None:
    """`insert_value`, in the place of what was there."""
    context.context().delete_config_key_value(key)
    insert_value(key, value)


def get_value(key: str, *, seconds: float) -> str | None:
    """A value of the store, waited for; None where it does not come. Private and raises as above.

    Other threads of Python run meanwhile.
    """
    try:
        return str(context.context().get_config_key_value(key, max(1, int(seconds * 1000))))
    except (errors.DeadlineExceededError, errors.NotFoundError):
        return None


def peer_status(job: str, index: int, *, seconds: float = 1.0) -> str:
    """ "there", "gone" (nothing listens at its address), "restarted" or "silent".

    Private because nothing public asks TensorFlow's server of another task whether it is there.
    """
    task = f"/job:{job}/replica:0/task:{index}"
    try:
        context.context().check_collective_ops_peer_health(task, int(seconds * 1000))
    except errors.UnavailableError:
        return "gone"
    except errors.FailedPreconditionError:
        return "restarted"
    except errors.OpError:
        return "silent"
    return "there"


def abort_collectives(message: str) -> None:
    """Let every collective of this process fail, now and from now on, with this message.

    Private because there is no public way to end a collective that waits.
    """
    context.context().abort_collective_ops(errors.UNAVAILABLE, message)
