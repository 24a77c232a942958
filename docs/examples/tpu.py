"""TPUStrategy without a TPU: the settings, and a clear error if no TPU is there.

    python docs/examples/tpu.py
    TPU_NAME=grpc://10.0.0.2:8470 python docs/examples/tpu.py

If no process answers at the address, TensorFlow retries forever without a message. It also looks
up a name at Google Cloud without a limit. If a local TPU is not there, the error is "index 0 is out
of bounds".
"""

import os
import socket
import time

import tensorflow as tf

import tfdist_ext as tfd


def settings(tpu, **options):
    """Returns the settings of the resolver. Does not use the network for "local" and addresses.

    Args:
        tpu: "local" for a TPU of this machine, or "grpc://host:port", separated by commas.
    """
    resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu, **options)
    return {
        "master": resolver.master(),
        "cluster": resolver.cluster_spec().as_dict(),
        "task": (resolver.task_type, resolver.task_id),
    }


def plain(tpu, seconds=10.0):
    """Returns a TPUStrategy.

    Raises:
        RuntimeError: there is no TPU. The message names the address.
    """
    resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu)
    for job, addresses in resolver.cluster_spec().as_dict().items():
        for address in addresses:
            # TensorFlow would wait forever, so check first that a process listens.
            host, _, port = address.rpartition(":")
            try:
                socket.create_connection((host, int(port)), seconds).close()
            except OSError as error:
                raise RuntimeError(f"no TPU at {tpu!r}: {job} {address}: {error}") from error
    try:
        if resolver.cluster_spec():  # a local TPU is in this process
            tf.config.experimental_connect_to_cluster(resolver)
        tf.tpu.experimental.initialize_tpu_system(resolver)
    except (tf.errors.OpError, ValueError) as error:
        devices = [device.name for device in tf.config.list_logical_devices()]
        why = str(error).split(". ")[0]
        raise RuntimeError(f"no TPU at {tpu!r}: {why}. Devices are {devices}.") from error
    return tf.distribute.TPUStrategy(resolver)


def with_tfdist_ext(tpu=None):
    """Returns a TPUStrategy. The default is the TPU of TPU_NAME.

    Raises:
        tfd.StrategyError: no TPU answers within seconds.
    """
    return tfd.create_strategy("tpu", tpu=tpu)


def main():
    names = (
        [os.environ["TPU_NAME"]] if "TPU_NAME" in os.environ else ["local", "grpc://127.0.0.1:1"]
    )
    for tpu in names:
        print(f"{tpu}: {settings(tpu)}")
        for create in (plain, with_tfdist_ext):
            begun = time.monotonic()
            try:
                found = f"{create(tpu).num_replicas_in_sync} cores"
            except (RuntimeError, tfd.StrategyError) as error:
                found = str(error)
            print(f"{create.__name__}, {time.monotonic() - begun:.1f} s: {found}")


if __name__ == "__main__":
    main()
