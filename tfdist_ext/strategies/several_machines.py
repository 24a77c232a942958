"""The strategies of several machines: workers, parameter servers, and TPUs.

Each function checks what TensorFlow does not, then makes the strategy. The parameters of a function
are the options of its strategy.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf

from tfdist_ext.cluster.jobs import AddressError, ClusterDescription, addresses_of, identity
from tfdist_ext.cluster.liveness.watching import Servers
from tfdist_ext.cluster.liveness.wire import STARTED, Connection
from tfdist_ext.errors import StrategyError
from tfdist_ext.messages import shown
from tfdist_ext.placement.placer import ServerPlacer
from tfdist_ext.placement.scaling import BYTES_PER_WORKER, NARROW_BUCKETS
from tfdist_ext.placement.specs import parse_size
from tfdist_ext.strategies._tf_private import workers_strategy
from tfdist_ext.strategies.cluster_tasks import (
    Cluster,
    call_with_timeout,
    connecting,
    describe_for,
    resolver_of,
    run_preflight,
    serve,
    start_failures_in_words,
    usable_cores,
)
from tfdist_ext.strategies.one_machine import seen_devices
from tfdist_ext.strategies.owned_sums import NarrowSums, OwnedSums, Sums, set_sums
from tfdist_ext.strategies.placed import PlacedParameterServers

TPU_LOOKUP_SECONDS = 30.0  # for Google Cloud's metadata server and TPU API
REACH_SECONDS = 10.0  # for a TPU to answer
_STARTED_WITHIN = 10.0  # seconds for servers to start after the preflight
# Group keys of collectives that are reserved for each strategy of a process. A strategy that was
# created elsewhere has the first ones. All workers create their strategies in the same order.
_KEYS = 1000
_next_key = _KEYS + 1  # of the next strategy


def multi_worker_mirrored(
    *,
    cluster: Cluster = None,
    communication: str | None = None,
    communication_options: tf.distribute.experimental.CommunicationOptions | None = None,
    bucket_bytes: int | str | None = None,
    shard_optimizer: bool = False,
    gradient_dtype: str | None = None,
    wait: float | None = None,
) -> tf.distribute.Strategy:
    """A copy on each worker of the cluster.

    Blocks for at most `wait` seconds until all workers are there. Workers on one machine share its
    cores.

    Args:
        bucket_bytes: gradients are summed over workers in buckets of this size, as 4_000_000 or
            "16MB". 0 leaves them to TensorFlow, which makes one tensor of all. By default 4 MiB
            times the number of workers on CPUs, a quarter with `gradient_dtype`, and 0 on GPUs.
        shard_optimizer: each worker holds the optimizer's slots of a part of the weights, and
            updates that part (ZeRO stage 1). Without it each worker holds all slots.
        gradient_dtype: "bfloat16" or "float16": gradients travel between workers in this type, with
            half of the bytes. Sums, clipping, loss scaling and updates keep the gradients' own
            type. By default gradients travel as they are. bfloat16 has the range of float32. In
            float16, gradients and sums above 65,504 become infinite, and a LossScaleOptimizer then
            skips the step and lowers its scale.
    """
    if not isinstance(shard_optimizer, bool):
        raise StrategyError(f"shard_optimizer must be True or False, got {shard_optimizer!r}.")
    if gradient_dtype not in (None, "bfloat16", "float16"):
        raise StrategyError(
            f"gradient_dtype must be 'bfloat16' or 'float16', got {gradient_dtype!r}. Leave it out"
            " to send gradients as they are."
        )
    size = None if bucket_bytes is None else parse_size(bucket_bytes, "bucket_bytes")
    options = _communication_options(communication, communication_options)
    described = _workers_described(cluster)
    addresses = addresses_of(described.jobs)
    hosts = {task: identity(address)[0] for task, address in addresses.items()}
    _share_cores(list(hosts.values()).count(hosts[str(described.task)]))
    with start_failures_in_words(described):
        endpoint = run_preflight(described, wait, first=True)
        if endpoint is not None:
            endpoint.free_port()
        with _sigterm_kept(), connecting():
            strategy, last_key = _with_new_keys(resolver_of(cluster), options)
    owned = narrow = None
    if gradient_dtype and strategy.num_replicas_in_sync > 1:
        workers = _workers_of(strategy, described, f"gradient_dtype={gradient_dtype!r}")
        narrow = NarrowSums(last_key, *workers, gradient_dtype)
    on_cpus = all("CPU" in device for device in strategy.extended.worker_devices)
    usual = BYTES_PER_WORKER * strategy.num_replicas_in_sync if on_cpus else 0
    usual = options.bytes_per_pack or (usual // NARROW_BUCKETS if narrow else usual)
    size = usual if size is None else size
    if shard_optimizer and strategy.num_replicas_in_sync > 1:
        workers = _workers_of(strategy, described, "shard_optimizer=True")
        owned = OwnedSums(last_key - 1, *workers, size, narrow)
    set_sums(strategy, Sums(bucket_bytes=size, owned=owned, narrow=narrow))
    return strategy


def _with_new_keys(resolver: Any, options: Any) -> tuple[tf.distribute.Strategy, int]:
    """Creates a strategy with group keys of its own; returns it and the last of its keys."""
    global _next_key
    strategy = workers_strategy(_next_key, cluster_resolver=resolver, communication_options=options)
    # After a failure the next call has the same keys, as on workers where no call has failed.
    _next_key += _KEYS
    return strategy, _next_key - 1


def _workers_described(cluster: Cluster) -> ClusterDescription:
    """The cluster of `multi_worker_mirrored`.

    Raises:
        StrategyError: the cluster has other tasks than workers, or does not name this task.
    """
    described = describe_for("multi_worker_mirrored", cluster)
    if others := [job for job in described.jobs if job not in ("chief", "worker")]:
        raise StrategyError(
            "multi_worker_mirrored takes a chief and workers only, and"
            f" {described.source} has {' and '.join(others)} tasks. Use parameter_server for ps"
            " tasks. Start an evaluator without TF_CONFIG, or with a separate one."
        )
    if described.task is None:
        raise StrategyError(
            f"{described.source} does not say which task this process is. Pass task_type= and"
            " task_id=, as in SimpleClusterResolver(spec, task_type='worker', task_id=0)."
        )
    return described


def _communication_options(communication: str | None, options: Any) -> Any:
    """TensorFlow's CommunicationOptions: as given, or with our short name of an implementation."""
    options_class = tf.distribute.experimental.CommunicationOptions
    if communication not in (None, "auto", "ring", "nccl"):
        raise StrategyError(
            f"communication={communication!r} is not supported. Use 'auto', 'ring' or 'nccl'."
        )
    if options is None:
        implementations = tf.distribute.experimental.CommunicationImplementation
        return options_class(implementation=implementations((communication or "auto").upper()))
    # The class that TensorFlow exports makes objects of another class.
    if communication is not None or not isinstance(options, type(options_class())):
        raise StrategyError(
            "communication_options must be a tf.distribute.experimental.CommunicationOptions,"
            f" without communication=, got {shown(options)}. Pass the implementation in it."
        )
    return options


def _workers_of(
    strategy: tf.distribute.Strategy, described: ClusterDescription, setting: str
) -> tuple[int, int]:
    """The number of workers, and the number of this one.

    Raises:
        StrategyError: a worker has several devices, and `setting` needs one.
    """
    tasks = list(addresses_of(described.jobs))
    if strategy.num_replicas_in_sync != len(tasks):
        devices = ", ".join(strategy.extended.worker_devices)
        raise StrategyError(
            f"{setting} needs one device in each task, and this task has {devices}. Start one task"
            " for each GPU: tfdist run --process-per-device does it on one machine."
        )
    return len(tasks), tasks.index(str(described.task))


def parameter_server(
    *, cluster: Cluster = None, placement: Any = None, wait: float | None = None
) -> tf.distribute.Strategy:
    """Variables on the cluster's `ps` tasks. The chief makes the strategy and coordinates.

    In a `ps` or `worker` task this serves instead, and ends the process when the coordinator has
    ended. Blocks for at most `wait` seconds until the other tasks are there.
    """
    described = describe_for("parameter_server", cluster)
    if "ps" not in described.jobs or "worker" not in described.jobs:
        raise StrategyError(
            f"parameter_server needs ps and worker tasks, and {described.source} has {described}."
        )
    if described.serves:
        serve(cluster, wait)
    placer = ServerPlacer(placement, len(described.jobs["ps"]))
    with start_failures_in_words(described):
        endpoint = run_preflight(described, wait)
        if endpoint is not None:
            endpoint.free_port()
        addresses = {
            task: address
            for task, address in addresses_of(described.jobs).items()
            if not task.startswith("chief")
        }
        servers = Servers(str(described.task or "coordinator"), addresses)
        _wait_for_servers(addresses.values())
        with connecting():
            strategy = PlacedParameterServers(resolver_of(cluster), placer, servers)
    servers.send_result_at_exit()
    _Coordinator(strategy)  # TensorFlow keeps the first coordinator of a strategy
    return strategy


def _wait_for_servers(addresses: Iterable[str]) -> None:
    """Return when TensorFlow's servers answer, or after a while.

    TensorFlow fails where it connects while a task still ends the calls of its preflight.
    """
    deadline = time.monotonic() + _STARTED_WITHIN
    for address in addresses:
        while not _is_server(address) and time.monotonic() < deadline:
            time.sleep(0.05)


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
    if processes < 2 or usable_cores() < cores or "TF_NUM_INTRAOP_THREADS" in os.environ:
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


def tpu(
    *,
    cluster: Cluster = None,
    tpu: str | None = None,
    zone: str | None = None,
    project: str | None = None,
) -> tf.distribute.Strategy:
    """A copy on each core of a TPU: its name, "grpc://host:port", or "local" for this machine's."""
    resolver_class = tf.distribute.cluster_resolver.TPUClusterResolver
    named = tpu or zone or project
    if cluster is not None and (named or not isinstance(cluster, resolver_class)):
        raise StrategyError(
            "tpu takes either a TPUClusterResolver as cluster=, or tpu=, zone= and project=, not"
            f" cluster={cluster!r}{f' and {named!r}' if named else ''}."
        )
    name = repr(tpu) if cluster is None else "the TPUClusterResolver"

    def look_up() -> tuple[Any, Any]:
        resolver = cluster or resolver_class(tpu=tpu, zone=zone, project=project)
        return resolver, resolver.cluster_spec()

    try:
        if cluster is None and not tpu:
            raise LookupError("neither TPU_NAME nor tpu= is set")
        resolver, spec = call_with_timeout(TPU_LOOKUP_SECONDS, look_up)
        jobs = spec.as_dict() if spec else {}
        for address in [address for tasks in jobs.values() for address in tasks]:
            if not _is_server(address):  # TensorFlow would try to connect forever
                raise LookupError(
                    f"no TPU server answers at {address}; check that it is running and that this"
                    " host can reach it"
                )
        tf.config.experimental_connect_to_cluster(resolver)
        tf.tpu.experimental.initialize_tpu_system(resolver)
    except Exception as error:  # depends on the network and on Google Cloud's client
        line = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise StrategyError(
            f"no TPU found{f' at {name}' if tpu or cluster else ''}: {line.rstrip('.')}. Pass its"
            " name, with zone= and project= outside of Google Cloud, its address as"
            " 'grpc://host:port', or 'local' on a TPU machine. Devices seen are"
            f" {', '.join(seen_devices())}."
        ) from error
    return tf.distribute.TPUStrategy(resolver)


def _is_server(address: str) -> bool:
    try:
        connection = Connection(address)
    except AddressError:
        return False
    state, _ = connection.ask({}, REACH_SECONDS)
    connection.close()
    return state == STARTED
