"""The TPU strategy: found and reached within a bounded time, or refused in a sentence."""

from __future__ import annotations

import tensorflow as tf

from tfdist_ext.cluster.addresses import AddressError
from tfdist_ext.cluster.liveness.wire import STARTED, Connection
from tfdist_ext.errors import StrategyError
from tfdist_ext.strategies.devices import seen_devices
from tfdist_ext.strategies.resolvers import Cluster, call_with_timeout

__all__ = ["tpu"]

LOOKUP_SECONDS = 30.0  # Google Cloud's metadata server and TPU API, which TensorFlow asks unbounded
REACH_SECONDS = 10.0


def tpu(
    *, cluster: Cluster = None, tpu: str | None = None, zone: str | None = None,
    project: str | None = None,
) -> tf.distribute.Strategy:  # fmt: skip
    """A copy on each core of a TPU: its name, "grpc://host:port", or "local" for this machine's."""
    resolvers = tf.distribute.cluster_resolver
    if cluster is not None:
        if not isinstance(cluster, resolvers.TPUClusterResolver):
            raise StrategyError(
                f"cluster of tpu must be a TPUClusterResolver, got {cluster!r}. Or pass tpu= with"
                " the name of the TPU."
            )
        if any(option is not None for option in (tpu, zone, project)):
            raise StrategyError(
                "tpu must get a TPUClusterResolver, or tpu=, zone= and project=, got both."
            )
        return _connected(cluster, "the TPUClusterResolver")
    if not tpu:
        raise StrategyError(
            f"no TPU found: TPU_NAME is not set and tpu= was not given. {_seen()} Pass tpu= with"
            " the name or address of a TPU, which is 'local' for a TPU of this machine."
        )
    try:
        resolver = call_with_timeout(
            LOOKUP_SECONDS,
            lambda: resolvers.TPUClusterResolver(tpu=tpu, zone=zone, project=project),
        )
    except Exception as error:  # what it raises depends on the network and the cloud's client
        raise StrategyError(
            f"no TPU found under the name {tpu!r}: asking Google Cloud about it failed ({error})."
            f" {_seen()} Outside of Google Cloud pass zone= and project=, or the address of the"
            " TPU as 'grpc://host:port'; on a TPU machine pass 'local'."
        ) from error
    return _connected(resolver, repr(tpu))


def _connected(
    resolver: tf.distribute.cluster_resolver.TPUClusterResolver, name: str
) -> tf.distribute.Strategy:
    try:
        spec = call_with_timeout(LOOKUP_SECONDS, resolver.cluster_spec)
    except Exception as error:
        raise _not_found(name, error) from error
    jobs = spec.as_dict() if spec else {}
    addresses = [address for tasks in jobs.values() for address in tasks]
    for address in addresses:
        # TensorFlow tries to connect forever, and reports nothing.
        if not _is_server(address):
            raise StrategyError(
                f"no TPU found at {name}: no TPU server answers at {address}. {_seen()} Is the TPU"
                " running, is its address right, may this host reach it?"
            )
    try:
        tf.config.experimental_connect_to_cluster(resolver)
        tf.tpu.experimental.initialize_tpu_system(resolver)
    except (tf.errors.OpError, ValueError, RuntimeError) as error:
        raise _not_found(name, error) from error
    return tf.distribute.TPUStrategy(resolver)


def _is_server(address: str) -> bool:
    try:
        connection = Connection(address)
    except AddressError:
        return False
    state, _ = connection.ask({}, REACH_SECONDS)
    connection.close()
    return state == STARTED


def _not_found(name: str, error: BaseException) -> StrategyError:
    line = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return StrategyError(f"no TPU found at {name}: {line.split('. ')[0].rstrip('.')}. {_seen()}")


def _seen() -> str:
    return f"Devices seen are {', '.join(seen_devices())}."
