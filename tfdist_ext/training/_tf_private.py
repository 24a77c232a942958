"""The private names of TensorFlow that training uses, each with the reason."""

from __future__ import annotations

import contextlib
import sys
import threading
import traceback
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfdist_ext.errors import TrainingError
from tfdist_ext.private_names import PrivateNames

NAMES = PrivateNames(
    "tensorflow.python",
    TrainingError,
    {
        "distribute.mirrored_strategy.MirroredExtended": "variables of several workers",
        "eager.context.context": "the other workers",
        "eager.record.could_possibly_record": "models inside of other models",
    },
)


def _context() -> Any:
    return NAMES("eager.context.context")()


def records_gradients() -> bool:
    """Whether a tf.GradientTape of this thread records. Private: no public function tells."""
    return bool(NAMES("eager.record.could_possibly_record")())


@contextlib.contextmanager
def creating_without_broadcast(
    strategy: tf.distribute.MultiWorkerMirroredStrategy,
) -> Iterator[None]:
    """Scope in which the variables of MultiWorkerMirroredStrategy start from this task's values.

    Private because the strategy broadcasts the chief's value of each new variable. If workers make
    different variables, the broadcast fails or waits forever, before the models are compared.
    """
    mirrored, extended = NAMES("distribute.mirrored_strategy.MirroredExtended"), strategy.extended
    name, use = "_get_variable_creator_initial_value", "variables of several workers"
    outer = vars(extended).get(name)
    setattr(extended, name, NAMES.of(mirrored, name, use).__get__(extended))
    try:
        yield
    finally:
        if outer is None:
            delattr(extended, name)
        else:
            setattr(extended, name, outer)


def leave_container(variable: tf.Variable) -> None:
    """Makes a copy of a distributed variable an ordinary tf.Variable.

    Private because TensorFlow marks the handles of copies, and never takes a mark away.
    """
    for marked in (variable, variable.handle):
        vars(marked).pop("_distributed_container", None)


def has_coordination_service() -> bool:
    """Whether this process is in a cluster whose tasks share a key-value store.

    Private because MultiWorkerMirroredStrategy starts the coordination service and shows it
    nowhere. It is the one channel between workers that works while a collective waits.
    """
    return _context().coordination_service is not None


def insert_value(key: str, value: str) -> None:
    """Inserts into the store of the coordination service; a value that is there stays.

    Private as `has_coordination_service` is. Takes half a millisecond.

    Raises:
        tf.errors.OpError: the task that keeps the store does not answer.
    """
    with contextlib.suppress(tf.errors.AlreadyExistsError):
        _context().set_config_key_value(key, value)


def replace_value(key: str, value: str) -> None:
    """Sets a value in the store, and overwrites an older one."""
    _context().delete_config_key_value(key)
    insert_value(key, value)


def get_value(key: str, *, seconds: float) -> str:
    """Waits for a value of the store; other threads of Python run meanwhile.

    Private as above.

    Raises:
        tf.errors.OpError: there is no value after `seconds`, or the store does not answer.
    """
    return str(_context().get_config_key_value(key, max(1, int(seconds * 1000))))


def abort_collectives(message: str) -> None:
    """Aborts all current and future collectives of this process.

    Private because there is no public way to end a collective that waits.
    """
    _context().abort_collective_ops(tf.errors.UNAVAILABLE, message)


def busy_workers() -> str:
    """The workers that have not answered their calls, as "worker:0, worker:1"; "" for none.

    Private because TensorFlow's coordinator does not say what its threads, one for each worker,
    wait for. While a worker computes, its thread is in `_process_closure`.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    busy = []
    for identifier, frame in sys._current_frames().items():
        _, is_worker, number = names.get(identifier, "").rpartition("WorkerClosureProcessingLoop-")
        waits = any(at.name == "_process_closure" for at in traceback.extract_stack(frame))
        if is_worker and waits:
            busy.append(int(number))
    return ", ".join(f"worker:{number}" for number in sorted(busy))
