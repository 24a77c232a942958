"""The start of a cluster: the preflight, and a clear error if TensorFlow cannot start."""

from __future__ import annotations

import contextlib
import faulthandler
from collections.abc import Iterator

import tensorflow as tf

from tfdist_ext.cluster.addresses import identity
from tfdist_ext.cluster.liveness.preflight import PreflightError, info_of, preflight, tasks_of
from tfdist_ext.cluster.liveness.wire import Endpoint, port_is_free
from tfdist_ext.errors import StrategyError
from tfdist_ext.strategies.resolvers import Described

WAIT = 300.0  # seconds for the other tasks to come
_CONNECT = 120.0  # seconds for TensorFlow to connect to tasks that have all answered


def run_preflight(
    described: Described, wait: float | None, *, first: bool = False
) -> Endpoint | None:
    """Return when all tasks of the cluster are there, and agree on it.

    Late tasks are named on stderr. A task that is not in the cluster does not wait. A task whose
    port is in use does not wait either: TensorFlow listens there already, or reports the port.

    Args:
        wait: seconds; None: 300.
        first: the strategy must be made before TensorFlow starts.

    Returns:
        What still listens at the address of this task; None where there was no preflight.

    Raises:
        StrategyError: TensorFlow has started, or a task is missing or differs. The error names the
            task, and is the same on every task.
    """
    wait = WAIT if wait is None else wait
    me, source = str(described.task), described.source
    tasks = tasks_of(described.jobs)
    if me not in tasks or not port_is_free(identity(tasks[me])[1]):
        return None
    if first and _has_started():
        raise StrategyError(
            "multi_worker_mirrored must be made before TensorFlow starts, got TensorFlow started"
            " already: an operation, a tensor, a model, a dataset or a list of devices came first."
            " Move create_strategy() to the top of the program, above the first of them."
        )
    gpus = len(tf.config.list_physical_devices("GPU"))
    try:
        return preflight(info_of(me, described.jobs, gpus), wait=wait, source=source)
    except PreflightError as error:
        if not error.missing:
            raise StrategyError(
                f"all tasks of {source} must be started alike, each at its own address, got:"
                f" {error}. Correct that task, and start the job again."
            ) from error
        failure = StrategyError(
            f"all tasks of {source} must be there within {wait:g} s (wait), got {error}. Start"
            " them, correct their addresses on every task, or allow more seconds."
        )
        failure.missing = error.missing
        raise failure from error


def _has_started() -> bool:
    """Whether TensorFlow has started. No public function tells; its settings are fixed then."""
    threads = tf.config.threading.get_inter_op_parallelism_threads()
    try:
        tf.config.threading.set_inter_op_parallelism_threads(threads + 1)
    except RuntimeError:
        return True
    tf.config.threading.set_inter_op_parallelism_threads(threads)
    return False


@contextlib.contextmanager
def connecting() -> Iterator[None]:
    """Scope in which TensorFlow connects to tasks that have all answered.

    TensorFlow holds Python's lock meanwhile and ignores SIGTERM. If a task ends at this moment, a
    timer that needs no Python shows the stacks of this process and ends it.
    """
    faulthandler.dump_traceback_later(_CONNECT, exit=True, file=2)  # stderr may be no file
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


@contextlib.contextmanager
def start_failures_in_words(described: Described) -> Iterator[None]:
    """Scope that raises StrategyError if TensorFlow cannot listen at the address of this task."""
    try:
        yield
    except tf.errors.UnknownError as error:
        if "Could not start gRPC server" not in str(error) or described.task is None:
            raise
        raise StrategyError(
            f"{described.task} cannot listen at {described.address}, the address from"
            f" {described.source}: the port is in use. Stop the process that uses it (this"
            " program, started before?), or give this task another port on every task."
        ) from error
