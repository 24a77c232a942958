"""One function for each strategy that spans several processes."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfdist_ext.cluster.addresses import identity
from tfdist_ext.errors import StrategyError
from tfdist_ext.placement.placer import ServerPlacer
from tfdist_ext.strategies.cluster_start import (
    connecting,
    run_preflight,
    start_failures_in_words,
)
from tfdist_ext.strategies.placed import PlacedParameterServers
from tfdist_ext.strategies.resolvers import Cluster, Described, describe, resolver_of
from tfdist_ext.strategies.serving import Servers, serve, serves

__all__ = ["multi_worker_mirrored", "parameter_server"]


def multi_worker_mirrored(
    *, cluster: Cluster = None, communication: Any = "auto", wait: float | None = None
) -> tf.distribute.Strategy:
    """A copy on each worker of the cluster.

    Blocks for at most `wait` seconds until all workers are there. Workers on one machine share its
    cores.
    """
    implementation = _implementation(communication)
    described = _described("multi_worker_mirrored", cluster, "--workers N")
    if others := [job for job in described.jobs if job not in ("chief", "worker")]:
        raise StrategyError(
            "the cluster of multi_worker_mirrored must have chief and worker tasks alone, got"
            f" {' and '.join(others)} tasks from {described.source}. Use parameter_server for ps"
            " tasks. Start an evaluator by itself, with a TF_CONFIG of its own or none."
        )
    if described.task is None:
        raise StrategyError(
            "the cluster of multi_worker_mirrored must say which task this process is, got no task"
            f" from {described.source}. Give it task_type= and task_id=, as in"
            " SimpleClusterResolver(spec, task_type='worker', task_id=0)."
        )
    options = tf.distribute.experimental.CommunicationOptions(implementation=implementation)
    here = identity(described.address)[0]
    _share_cores([identity(each)[0] for each in described.addresses.values()].count(here))
    with start_failures_in_words(described):
        endpoint = run_preflight(described, wait, first=True)
        if endpoint is not None:
            endpoint.free_port()
        with _sigterm_kept(), connecting():
            return tf.distribute.MultiWorkerMirroredStrategy(
                cluster_resolver=resolver_of(cluster), communication_options=options
            )


def parameter_server(
    *, cluster: Cluster = None, placement: Any = None, wait: float | None = None
) -> tf.distribute.Strategy:
    """Variables on the cluster's `ps` tasks. The chief makes the strategy and coordinates.

    In a `ps` or `worker` task this serves instead, and ends the process when the coordinator has
    ended. Blocks for at most `wait` seconds until the other tasks are there.
    """
    described = _described("parameter_server", cluster, "--chief --workers N --ps M")
    if "ps" not in described.jobs or "worker" not in described.jobs:
        raise StrategyError(
            f"the cluster of parameter_server must have ps and worker tasks, got {described} from"
            f" {described.source}."
        )
    if serves(described):
        serve(cluster, wait)
    placer = ServerPlacer(placement, len(described.jobs["ps"]))
    with start_failures_in_words(described):
        endpoint = run_preflight(described, wait)
        if endpoint is not None:
            endpoint.free_port()
        servers = Servers(described)
        with connecting():
            strategy = PlacedParameterServers(resolver_of(cluster), placer, servers)
    servers.send_result_at_exit()
    _Coordinator(strategy)  # TensorFlow keeps the first coordinator of a strategy
    return strategy


class _Coordinator(tf.distribute.coordinator.ClusterCoordinator):
    """A coordinator that lets the process end while a worker is being replaced.

    TensorFlow's own `__del__` waits for a lock. When Python ends, the thread that holds the lock
    no longer runs.
    """

    def __del__(self) -> None:
        if not sys.is_finalizing():
            super().__del__()


def _share_cores(processes: int) -> None:
    """Limit the threads of an operation to this process's share of the cores.

    TensorFlow splits each large operation over as many threads as there are cores. If several
    processes do so on the same cores, they wait for each other's threads in each operation. A
    limit that the user has set stays, and so does that of a process bound to some of the cores.

    Args:
        processes: of this job on this machine.
    """
    cores = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    if processes < 2 or usable < cores or "TF_NUM_INTRAOP_THREADS" in os.environ:
        return
    threads = tf.config.threading
    if not threads.get_intra_op_parallelism_threads():
        with contextlib.suppress(RuntimeError):  # TensorFlow has started
            threads.set_intra_op_parallelism_threads(max(1, cores // processes))


@contextlib.contextmanager
def _sigterm_kept() -> Iterator[None]:
    """Scope after which SIGTERM does what it did before.

    TensorFlow's coordination service sets a handler that only notes a preemption. `signal.signal`
    works in the main thread only, and a worker of Ray trains in another thread. `faulthandler`
    restores the handler that it replaced in any thread.
    """
    with open(os.devnull, "w") as nowhere:
        faulthandler.register(signal.SIGTERM, file=nowhere, chain=True)
        try:
            yield
        finally:
            faulthandler.unregister(signal.SIGTERM)


def _implementation(communication: Any) -> Any:
    value = communication.upper() if isinstance(communication, str) else communication
    try:
        return tf.distribute.experimental.CommunicationImplementation(value)
    except ValueError:
        raise StrategyError(
            f"communication must be one of auto, ring, nccl, got {communication!r}."
        ) from None


def _described(strategy: str, cluster: Cluster, options: str) -> Described:
    """The cluster's description, with an address for every task.

    Args:
        options: of `tfdist run`, for the message.
    """
    described = describe(cluster)
    if described is None or not described.jobs:
        source = "the call or the environment" if described is None else described.source
        raise StrategyError(
            f"{strategy} must have a cluster, got none from {source}: set TF_CONFIG, start the"
            f" script with `tfdist run {options}`, or pass cluster=."
        )
    if holes := [task for task, address in described.addresses.items() if not address]:
        raise StrategyError(
            f"the cluster of {strategy} must have an address for every task, got none for"
            f" {', '.join(holes)} from {described.source}. Number the tasks from 0."
        )
    return described
