"""One function for each strategy without tasks: checks what TensorFlow does not, then makes it.

The parameters of a function are the options of its strategy.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from tfdist_ext.cluster import tpu as tpu_environment
from tfdist_ext.cluster.addresses import AddressError
from tfdist_ext.cluster.liveness.wire import STARTED, Connection
from tfdist_ext.errors import StrategyError
from tfdist_ext.strategies._tf_private import with_metrics_per_replica
from tfdist_ext.strategies.devices import pick_devices, seen_devices
from tfdist_ext.strategies.placed import PlacedStrategy
from tfdist_ext.strategies.resolvers import Cluster, call_with_timeout

__all__ = ["central_storage", "default", "mirrored", "one_device", "placed", "tpu"]

Devices: TypeAlias = int | str | Sequence[str] | None

LOOKUP_SECONDS = 30.0  # for Google Cloud's metadata server and TPU API
REACH_SECONDS = 10.0  # for a TPU to answer


def default() -> tf.distribute.Strategy:
    """TensorFlow's default strategy, which is available outside of any scope only."""
    if tf.distribute.has_strategy():
        scope = type(tf.distribute.get_strategy()).__name__
        raise StrategyError(
            "the default strategy must be asked for outside of any scope, got the scope of"
            f" {scope}: call create_strategy outside of it."
        )
    return tf.distribute.get_strategy()


def one_device(*, devices: Devices = None) -> tf.distribute.Strategy:
    """Everything on one device: the given one, else the first GPU, else the CPU."""
    picked = pick_devices("one_device", devices, default="first")
    if len(picked) > 1:
        raise StrategyError(f"devices of one_device must be one device, got {', '.join(picked)}.")
    return tf.distribute.OneDeviceStrategy(picked[0])


def mirrored(*, devices: Devices = None) -> tf.distribute.Strategy:
    """A copy on each device: the given ones, else all GPUs, else all logical CPUs."""
    picked = pick_devices("mirrored", devices)
    on_cpus = all(name.startswith("CPU:") for name in picked)
    # The default collectives fail on CPUs inside a loop in the graph.
    reduction = tf.distribute.ReductionToOneDevice() if on_cpus else None
    try:
        return tf.distribute.MirroredStrategy(picked, cross_device_ops=reduction)
    except json.JSONDecodeError as error:
        raise StrategyError(
            f"TF_CONFIG must be JSON, because MirroredStrategy reads it, got: {error}. Correct it"
            " or unset it; mirrored needs none."
        ) from error


def central_storage(
    *, devices: Devices = None, parameter_device: str = "CPU:0"
) -> tf.distribute.Strategy:
    """Variables on `parameter_device`, computing on `devices`.

    Variables with `synchronization=ON_READ`, as those of Keras metrics, have a copy on each of
    `devices`.
    """
    computing = pick_devices("central_storage", devices)
    (keeping,) = pick_devices("central_storage", [parameter_device], option="parameter_device")
    strategy = tf.distribute.experimental.CentralStorageStrategy(computing, keeping)
    return with_metrics_per_replica(strategy)


def placed(
    *, devices: Devices = None, placement: Any = (), owned_from: int | str = "16KiB"
) -> tf.distribute.Strategy:
    """Each variable on the devices that its rule says."""
    return PlacedStrategy(devices, placement, owned_from=owned_from)


def tpu(
    *,
    cluster: Cluster = None,
    tpu: str | None = None,
    zone: str | None = None,
    project: str | None = None,
) -> tf.distribute.Strategy:
    """A copy on each core of a TPU: its name, "grpc://host:port", or "local" for this machine's."""
    resolver_class = tf.distribute.cluster_resolver.TPUClusterResolver
    if not isinstance(cluster, resolver_class | None):
        raise StrategyError(
            f"cluster of tpu must be a TPUClusterResolver, got {cluster!r}. Or pass tpu= with the"
            " name of the TPU."
        )
    if cluster is not None and any(option is not None for option in (tpu, zone, project)):
        raise StrategyError(
            "tpu must get a TPUClusterResolver, or tpu=, zone= and project=, got both."
        )
    signal = tpu_environment.detect(os.environ)
    if cluster is None and tpu is None and signal is not None:
        tpu, zone, project = signal.name, zone or signal.zone, project or signal.project
    if cluster is None and not tpu:
        raise StrategyError(
            f"no TPU found: TPU_NAME is not set and tpu= was not given. {_seen()} Pass tpu= with"
            " the name or address of a TPU, which is 'local' for a TPU of this machine."
        )
    name = "the TPUClusterResolver" if cluster is not None else repr(tpu)

    def look_up() -> tuple[Any, Any]:
        resolver = (
            resolver_class(tpu=tpu, zone=zone, project=project) if cluster is None else cluster
        )
        return resolver, resolver.cluster_spec()

    try:
        resolver, spec = call_with_timeout(LOOKUP_SECONDS, look_up)
    except Exception as error:  # depends on the network and on Google Cloud's client
        raise StrategyError(
            f"no TPU found at {name}: asking Google Cloud about it failed ({error}). {_seen()}"
            " Outside of Google Cloud pass zone= and project=, or the address of the TPU as"
            " 'grpc://host:port'; on a TPU machine pass 'local'."
        ) from error
    return _connected(resolver, spec, name)


def _connected(
    resolver: tf.distribute.cluster_resolver.TPUClusterResolver,
    spec: tf.train.ClusterSpec | None,
    name: str,
) -> tf.distribute.Strategy:
    jobs = spec.as_dict() if spec else {}
    for address in [address for tasks in jobs.values() for address in tasks]:
        if not _is_server(address):  # TensorFlow would try to connect forever
            raise StrategyError(
                f"no TPU found at {name}: no TPU server answers at {address}. {_seen()} Is the TPU"
                " running, is its address right, may this host reach it?"
            )
    try:
        tf.config.experimental_connect_to_cluster(resolver)
        tf.tpu.experimental.initialize_tpu_system(resolver)
    except (tf.errors.OpError, ValueError, RuntimeError) as error:
        line = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise StrategyError(
            f"no TPU found at {name}: {line.split('. ')[0].rstrip('.')}. {_seen()}"
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


def _seen() -> str:
    return f"Devices seen are {', '.join(seen_devices())}."
