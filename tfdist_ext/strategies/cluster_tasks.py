"""The cluster of a strategy: its description, how its tasks start and serve, and `tfd.run`."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from typing import Any, NoReturn, TypeAlias, TypeVar

import tensorflow as tf

from tfdist_ext.cluster import ClusterConfig, Task
from tfdist_ext.cluster.jobs import ClusterDescription, Jobs, addresses_of, identity
from tfdist_ext.cluster.liveness.preflight import WAIT, PreflightError, info_of, preflight
from tfdist_ext.cluster.liveness.watching import DONE, result_of_coordinator
from tfdist_ext.cluster.liveness.wire import Endpoint, port_is_free
from tfdist_ext.errors import PeerError, StrategyError
from tfdist_ext.failures import record
from tfdist_ext.launcher.exit_codes import RESTART
from tfdist_ext.user_frames import filter_traceback

_CONNECT = 120.0  # seconds for TensorFlow to connect to tasks that have all answered
_SESSION = 5.0  # seconds for the coordinator to open its session
_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of malloc.h
LOOKUP_SECONDS = 60.0  # a resolver may ask scontrol, Kubernetes or a cloud

Result = TypeVar("Result")

# What describes a cluster; None: no cluster.
Cluster: TypeAlias = "ClusterConfig | tf.distribute.cluster_resolver.ClusterResolver | None"


def resolver_of(cluster: Cluster) -> tf.distribute.cluster_resolver.ClusterResolver:
    """TensorFlow's form of a cluster; its own resolvers stay as they are."""
    resolvers = tf.distribute.cluster_resolver
    if isinstance(cluster, resolvers.ClusterResolver):
        return cluster
    if not isinstance(cluster, ClusterConfig):
        raise StrategyError(
            f"cluster={cluster!r} is neither a ClusterConfig nor a TensorFlow ClusterResolver. For"
            " the text of a TF_CONFIG use ClusterConfig.from_tf_config(text)."
        )
    return resolvers.SimpleClusterResolver(
        tf.train.ClusterSpec(dict(cluster.jobs)),
        task_type=cluster.task.type,
        task_id=cluster.task.index,
        rpc_layer="grpc",
    )


def describe(cluster: Cluster) -> ClusterDescription | None:
    """Describe a cluster, checked as a TF_CONFIG is; None without one, and for a TPU.

    Raises:
        StrategyError: it is no cluster, or the resolver failed or did not answer in a minute.
        ClusterConfigError: it describes a cluster that cannot be right.
    """
    if cluster is None or isinstance(cluster, tf.distribute.cluster_resolver.TPUClusterResolver):
        return None  # a TPU's resolver asks the cloud each time
    if isinstance(cluster, ClusterConfig):
        return ClusterDescription(cluster.jobs, cluster.task, cluster.source)
    resolver, source = resolver_of(cluster), type(cluster).__name__

    def look_up() -> tuple[tf.train.ClusterSpec, str | None, int | None]:
        # SlurmClusterResolver knows its task only after the cluster.
        return resolver.cluster_spec(), resolver.task_type, resolver.task_id

    try:
        spec, task_type, task_id = call_with_timeout(LOOKUP_SECONDS, look_up)
    except Exception as error:  # what it raises depends on the resolver and on its clients
        raise StrategyError(
            f"{source} cannot describe the cluster: {type(error).__name__}: {error}"
        ) from error
    jobs = {job: _addresses(tasks) for job, tasks in (spec.as_dict() if spec else {}).items()}
    task = Task(task_type, task_id or 0) if jobs and task_type else None
    if task is None:
        return ClusterDescription(Jobs(jobs, source) if jobs else {}, None, source)
    return describe(ClusterConfig(jobs, task, source=source))


def describe_for(strategy: str, cluster: Cluster) -> ClusterDescription:
    """The description of a cluster that is there.

    Args:
        strategy: its name, for messages.

    Raises:
        StrategyError: there is no cluster.
        ClusterConfigError: as `describe`.
    """
    described = describe(cluster)
    if described is None or not described.jobs:
        source = "the environment" if described is None else described.source
        servers = " --ps M" if strategy == "parameter_server" else ""
        raise StrategyError(
            f"{strategy} needs a cluster, but {source} describes none. Set TF_CONFIG, start the"
            f" script with `tfdist run --workers N{servers}`, or pass cluster=."
        )
    return described


def call_with_timeout(seconds: float, call: Callable[[], Result]) -> Result:
    """Returns the result of `call`, or raises its error, within a time limit.

    `call` runs in a daemon thread, which continues after a timeout.

    Raises:
        TimeoutError: `call` took longer than `seconds`.
    """
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="tfdist-bounded", daemon=True).start()
    if not wait_for([future], seconds).done:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return future.result()


def _addresses(tasks: Any) -> tuple[str, ...]:
    """A ClusterSpec gives a list, or index -> address where indices are missing."""
    if not isinstance(tasks, Mapping):
        return tuple(tasks)
    return tuple(tasks.get(index, "") for index in range(max(tasks, default=-1) + 1))


class RoleEnded(SystemExit):
    """The end of a task that does not drive the training: status 0, or 138 after a crash."""


@filter_traceback
def run(main: Callable[[], Result]) -> Result | None:
    """Runs `main`, or a server, depending on the task of this process.

    - Without a cluster, in a worker of a multi-worker cluster, and in the chief of a cluster with
      parameter servers: calls `main()` and returns its result.
    - In a `ps` or `worker` task of a cluster with parameter servers: runs a server, and returns
      None when the coordinator ends. `main` is not called.
    - In an `evaluator` task: calls `main()`. `fit(checkpoint_dir=...)` then evaluates each new
      checkpoint instead of training. `run` returns None when the training is complete.

    The servers run until the process of the coordinator ends. Code after `run` can therefore use
    variables on the servers.

    Args:
        main: a function without arguments.

    Raises:
        SystemExit: another task did not start, died or does not respond. In a `ps`, `worker` or
            `evaluator` task: the coordinator failed or died. The exit code is 138, which asks a
            scheduler to restart the job.
        ClusterConfigError: the environment describes an invalid cluster.
        StrategyError: a server cannot listen at its address.
        Exception: any exception of `main`.
    """
    cluster = ClusterConfig.from_env(os.environ)
    try:
        described = describe(cluster)
        if described is not None and described.serves:
            serve(cluster)  # ends in RoleEnded
        return main()
    except RoleEnded as end:
        if end.code:
            raise
        return None
    except SystemExit as end:
        if end.code not in (None, 0):
            record(end)
        raise
    except Exception as error:
        if cluster is None or not _because_of_another_task(error):
            raise
        # As Python ends on an exception, with another status: a scheduler sees only the status.
        record(error)
        sys.excepthook(type(error), error, error.__traceback__)
        raise SystemExit(RESTART) from None


def _because_of_another_task(error: Exception) -> bool:
    """Whether a restart may help: another task did not come, is gone, or does not answer."""
    if isinstance(error, PeerError):
        return not error.permanent
    if isinstance(error, StrategyError):
        return bool(error.missing)
    return isinstance(error, tf.errors.UnavailableError | tf.errors.AbortedError)


def serve(cluster: Cluster, wait: float | None = None) -> NoReturn:
    """Serve as this task of a cluster with parameter servers until the coordinator has ended.

    Signals end it at once.

    Args:
        wait: seconds to wait for the other tasks; None: 300.

    Raises:
        RoleEnded: always: with 0 when the coordinator has ended well, else with 138.
        StrategyError: this task cannot listen at its address, or another task does not come in
            time.
    """
    described = describe_for("parameter_server", cluster)
    task = described.task
    assert task is not None
    if task.type == "ps":
        _return_freed_memory()
    resolver = resolver_of(cluster)
    endpoint = run_preflight(described, wait)
    if endpoint is None:
        raise _port_is_in_use(described)
    endpoint.free_port(session_within=_SESSION)
    try:
        with start_failures_in_words(described):
            # Not join(): it never returns, and it keeps Python from handling signals.
            server = tf.distribute.Server(
                resolver.cluster_spec(),
                job_name=task.type,
                task_index=task.index,
                protocol=resolver.rpc_layer or "grpc",
                config=_server_config(),
            )
        result = result_of_coordinator(described, endpoint)
        del server  # it serves as long as there is a reference
    finally:
        endpoint.close()
    # Recorded as no failure of this task. The launcher restarts it with the coordinator.
    raise RoleEnded(0 if result == DONE else RESTART)


def _return_freed_memory() -> None:
    """Gives freed tensors back to the system, so that a server needs little more than variables.

    TensorFlow's allocator keeps them. It reads the environment at the first tensor of a process.
    glibc keeps what is smaller than a limit, which it raises up to 32 MiB unless it is set.
    """
    os.environ.setdefault("TF_ONEDNN_USE_SYSTEM_ALLOCATOR", "1")
    with contextlib.suppress(AttributeError, TypeError):  # no glibc
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 4 * 2**20)


def _server_config() -> tf.compat.v1.ConfigProto | None:
    """At least two threads between operations; None if the default has two or more.

    TensorFlow's server answers its calls in as many threads as this process has cores. A step waits
    in one of them for tensors that another call asks for, so with one thread it waits forever.
    """
    if usable_cores() > 1 or "TF_NUM_INTEROP_THREADS" in os.environ:
        return None
    return tf.compat.v1.ConfigProto(inter_op_parallelism_threads=2)


def usable_cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_preflight(
    described: ClusterDescription, wait: float | None, *, first: bool = False
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
    tasks = addresses_of(described.jobs)
    if me not in tasks or not port_is_free(identity(tasks[me])[1]):
        return None
    if first and _has_started():
        raise StrategyError(
            "multi_worker_mirrored must be created before TensorFlow starts, but an operation, a"
            " tensor, a model, a dataset or a list of devices came first. Move create_strategy() to"
            " the top of the program."
        )
    gpus = len(tf.config.list_physical_devices("GPU"))
    try:
        return preflight(info_of(me, described.jobs, gpus), wait=wait, source=source)
    except PreflightError as error:
        if not error.missing:
            raise StrategyError(
                f"the tasks of {source} do not match: {error}. Correct that task, and start the"
                " job again."
            ) from error
        failure = StrategyError(
            f"tasks of {source} are missing after {wait:g} s (wait): {error}. Start them, correct"
            " their addresses on every task, or allow more seconds."
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
def start_failures_in_words(described: ClusterDescription) -> Iterator[None]:
    """Scope that raises StrategyError if TensorFlow cannot listen at the address of this task."""
    try:
        yield
    except tf.errors.UnknownError as error:
        if "Could not start gRPC server" not in str(error) or described.task is None:
            raise
        raise _port_is_in_use(described) from error


def _port_is_in_use(described: ClusterDescription) -> StrategyError:
    address = addresses_of(described.jobs)[str(described.task)]
    return StrategyError(
        f"{described.task} cannot listen at {address}, the address from {described.source}: the"
        " port is in use. Stop the process that uses it (an earlier run of this program?), or"
        " change the port of this task on every task."
    )
