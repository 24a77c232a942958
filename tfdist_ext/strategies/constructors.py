"""One function for each strategy without tasks: checks what TensorFlow does not, then makes it.

The parameters of a function are the options of its strategy.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, TypeAlias

import tensorflow as tf

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
    strategy = tf.distribute.get_strategy()
    if tf.distribute.has_strategy():
        raise StrategyError(
            "the default strategy is available outside of any scope only, got the scope of"
            f" {type(strategy).__name__}. Call create_strategy outside of this scope."
        )
    return strategy


def one_device(*, devices: Devices = None) -> tf.distribute.Strategy:
    """Everything on one device: the given one, else the first GPU, else the CPU."""
    picked = pick_devices("one_device", devices)
    if devices is not None and len(picked) > 1:
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
    (keeping,) = pick_devices("central_storage", [parameter_device])
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
    named = tpu or zone or project
    if cluster is not None and (named or not isinstance(cluster, resolver_class)):
        raise StrategyError(
            "tpu takes cluster=, a TPUClusterResolver, or tpu=, zone= and project=, got"
            f" cluster={cluster!r}{f' and {named!r}' if named else ''}."
        )
    if cluster is None and not tpu:
        raise _not_found("", "Set TPU_NAME, or pass tpu= with the name or address of a TPU")
    name = repr(tpu) if cluster is None else "the TPUClusterResolver"

    def look_up() -> tuple[Any, Any]:
        resolver = cluster or resolver_class(tpu=tpu, zone=zone, project=project)
        return resolver, resolver.cluster_spec()

    try:
        resolver, spec = call_with_timeout(LOOKUP_SECONDS, look_up)
    except Exception as error:  # depends on the network and on Google Cloud's client
        raise _not_found(
            name,
            f"asking Google Cloud about it failed ({error}). Outside of Google Cloud pass zone= and"
            " project=, or the address of the TPU as 'grpc://host:port'; on a TPU machine pass"
            " 'local'",
        ) from error
    jobs = spec.as_dict() if spec else {}
    for address in [address for tasks in jobs.values() for address in tasks]:
        if not _is_server(address):  # TensorFlow would try to connect forever
            raise _not_found(
                name,
                f"no TPU server answers at {address}. Check that the TPU is running, that its"
                " address is right, and that this host may reach it",
            )
    try:
        tf.config.experimental_connect_to_cluster(resolver)
        tf.tpu.experimental.initialize_tpu_system(resolver)
    except (tf.errors.OpError, ValueError, RuntimeError) as error:
        line = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise _not_found(name, line.split(". ")[0].rstrip(".")) from error
    return tf.distribute.TPUStrategy(resolver)


def _not_found(name: str, why: str) -> StrategyError:
    at = f" at {name}" if name else ""
    return StrategyError(f"no TPU found{at}: {why}. Devices seen are {', '.join(seen_devices())}.")


def _is_server(address: str) -> bool:
    try:
        connection = Connection(address)
    except AddressError:
        return False
    state, _ = connection.ask({}, REACH_SECONDS)
    connection.close()
    return state == STARTED
