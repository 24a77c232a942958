"""One function a strategy: checks what TensorFlow would not, then makes the real object.

The parameters of a function are the options of its strategy. One named `cluster` is given the
cluster of the call or of the environment: a ClusterConfig or a TensorFlow ClusterResolver.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from tfdist_ext.cluster import ClusterConfig
from tfdist_ext.errors import StrategyError
from tfdist_ext.strategies.devices import make_logical_cpus, pick_devices, seen_devices
from tfdist_ext.strategies.waiting import reporting_absent_peers

__all__ = [
    "central_storage",
    "default",
    "mirrored",
    "multi_worker_mirrored",
    "one_device",
    "parameter_server",
    "resolver_of",
    "tpu",
]

Devices: TypeAlias = int | str | Sequence[str] | None
# Or any TensorFlow ClusterResolver; TensorFlow ships no types.
Cluster: TypeAlias = ClusterConfig | Any | None

_COMMUNICATION = {
    "auto": tf.distribute.experimental.CommunicationImplementation.AUTO,
    "ring": tf.distribute.experimental.CommunicationImplementation.RING,
    "nccl": tf.distribute.experimental.CommunicationImplementation.NCCL,
}


def default() -> tf.distribute.Strategy:
    """TensorFlow's default strategy, whatever scope is open."""
    with tf.init_scope():
        strategy = tf.distribute.get_strategy()
    if tf.distribute.has_strategy():
        raise StrategyError(
            f"the default strategy cannot be had inside the scope of {type(strategy).__name__}:"
            " call create_strategy outside of it."
        )
    return strategy


def one_device(
    *, devices: Devices = None, logical_cpus: int | None = None
) -> tf.distribute.Strategy:
    """Everything on one device: the given one, else the first GPU, else the CPU."""
    if logical_cpus is not None:
        make_logical_cpus(logical_cpus)
    picked = pick_devices("one_device", devices, default="first")
    if len(picked) > 1:
        raise StrategyError(f"one_device takes one device; {', '.join(picked)} arrived.")
    return tf.distribute.OneDeviceStrategy(picked[0])


def mirrored(
    *,
    devices: Devices = None,
    logical_cpus: int | None = None,
    cross_device_ops: tf.distribute.CrossDeviceOps | None = None,
) -> tf.distribute.Strategy:
    """A copy on each device: the given ones, else all GPUs, else all logical CPUs."""
    if logical_cpus is not None:
        make_logical_cpus(logical_cpus)
    picked = pick_devices("mirrored", devices)
    if cross_device_ops is None and all(name.startswith("CPU:") for name in picked):
        # The default collectives fail on CPUs inside a loop in the graph.
        cross_device_ops = tf.distribute.ReductionToOneDevice()
    return tf.distribute.MirroredStrategy(picked, cross_device_ops=cross_device_ops)


def central_storage(
    *,
    devices: Devices = None,
    parameter_device: str | None = None,
    logical_cpus: int | None = None,
) -> tf.distribute.Strategy:
    """Variables on `parameter_device` (default: the CPU), computing on `devices`."""
    if logical_cpus is not None:
        make_logical_cpus(logical_cpus)
    computing = pick_devices("central_storage", devices)
    keeping = pick_devices("central_storage", parameter_device or "CPU:0")
    return tf.distribute.experimental.CentralStorageStrategy(computing, keeping[0])


def multi_worker_mirrored(
    *, cluster: Cluster = None, communication: str = "auto"
) -> tf.distribute.Strategy:
    """A copy on each worker of the cluster; blocks until all of them are there."""
    if cluster is None:
        raise StrategyError(
            "multi_worker_mirrored needs a cluster, and none was given or found in the"
            " environment: set TF_CONFIG, start the script with `tfdist run --workers N`, or pass"
            " cluster=."
        )
    if communication not in _COMMUNICATION:
        raise StrategyError(
            f"communication is one of {', '.join(_COMMUNICATION)}; {communication!r} arrived."
        )
    resolver = resolver_of(cluster)
    _refuse_jobs(resolver, ("ps", "evaluator"))
    options = tf.distribute.experimental.CommunicationOptions(
        implementation=_COMMUNICATION[communication]
    )
    with reporting_absent_peers(cluster):
        try:
            return tf.distribute.MultiWorkerMirroredStrategy(
                cluster_resolver=resolver, communication_options=options
            )
        except RuntimeError as error:
            if "program startup" not in str(error):
                raise
            raise StrategyError(
                "multi_worker_mirrored must be made before TensorFlow starts, and it has started:"
                " an operation, a tensor, a model, a data set or a list of devices came first."
                " Move create_strategy() to the top of the program, above the first of them."
            ) from error


def parameter_server(*, cluster: Cluster = None, partitioner: Any = None) -> tf.distribute.Strategy:
    """Variables on the cluster's `ps` tasks; made on its chief, which coordinates."""
    if cluster is None:
        raise StrategyError(
            "parameter_server needs a cluster with chief, worker and ps tasks, and none was given"
            " or found in the environment: set TF_CONFIG, start the script with"
            " `tfdist run --chief --workers N --ps M`, or pass cluster=."
        )
    resolver = resolver_of(cluster)
    spec = resolver.cluster_spec().as_dict()
    if not spec.get("ps") or not spec.get("worker"):
        raise StrategyError(
            f"parameter_server needs ps and worker tasks; the cluster has {', '.join(spec)}."
        )
    if resolver.task_type in ("ps", "worker"):
        raise StrategyError(
            f"this task is {resolver.task_type}:{resolver.task_id}; the parameter_server strategy"
            " is made on the chief. Here run"
            " tf.distribute.Server(resolver.cluster_spec(), resolver.task_type,"
            " resolver.task_id, protocol='grpc').join()."
        )
    with reporting_absent_peers(cluster):
        return tf.distribute.ParameterServerStrategy(resolver, variable_partitioner=partitioner)


def tpu(
    *, cluster: Cluster = None, name: str | None = None, zone: str | None = None,
    project: str | None = None,
) -> tf.distribute.Strategy:  # fmt: skip
    """A copy on each core of the TPU called `name` ("local" for one in this machine)."""
    resolvers = tf.distribute.cluster_resolver
    if isinstance(cluster, resolvers.TPUClusterResolver):
        resolver = cluster
    elif name is None:
        raise StrategyError(
            "no TPU found: TPU_NAME is not set and no name was given. Devices seen are"
            f" {', '.join(seen_devices())}. Pass name=, which is 'local' for a TPU of this machine."
        )
    else:
        try:
            resolver = resolvers.TPUClusterResolver(tpu=name, zone=zone, project=project)
        except Exception as error:  # what it raises depends on the cloud's client
            raise StrategyError(f"no TPU found under the name {name!r}: {error}") from error
    try:
        tf.config.experimental_connect_to_cluster(resolver)
        tf.tpu.experimental.initialize_tpu_system(resolver)
    except (tf.errors.OpError, ValueError) as error:
        first_line = str(error).strip().splitlines()[0]
        raise StrategyError(
            f"no TPU found at {name or resolver.master()!r}: {first_line} Devices seen are"
            f" {', '.join(seen_devices())}."
        ) from error
    return tf.distribute.TPUStrategy(resolver)


def resolver_of(cluster: Any) -> tf.distribute.cluster_resolver.ClusterResolver:
    """TensorFlow's form of a cluster; its own resolvers stay as they are."""
    resolvers = tf.distribute.cluster_resolver
    if isinstance(cluster, resolvers.ClusterResolver):
        return cluster
    if not isinstance(cluster, ClusterConfig):
        raise StrategyError(
            f"cluster takes a ClusterConfig or a TensorFlow ClusterResolver; {cluster!r} arrived."
        )
    jobs = {
        job: {index: address for index, address in enumerate(addresses) if address}
        for job, addresses in cluster.jobs.items()
    }
    return resolvers.SimpleClusterResolver(
        tf.train.ClusterSpec(jobs),
        task_type=cluster.task.type,
        task_id=cluster.task.index,
        environment=cluster.environment or "",
        rpc_layer=cluster.rpc_layer or "grpc",
    )


def _refuse_jobs(resolver: Any, jobs: Sequence[str]) -> None:
    spec = resolver.cluster_spec().as_dict()
    for job in jobs:
        if job in spec:
            raise StrategyError(
                f"multi_worker_mirrored trains on chief and worker tasks; this cluster also has"
                f" {job!r} ({spec[job]}). TensorFlow would hang or train alone. Remove {job!r} from"
                " the cluster"
                + (", or use parameter_server." if job == "ps" else ", and run it by itself.")
            )
    if resolver.task_type not in spec:
        raise StrategyError(
            f"this task is {resolver.task_type}:{resolver.task_id}, but the cluster has only"
            f" {', '.join(spec) or 'no tasks'}."
        )
