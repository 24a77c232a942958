"""One worker: what TensorFlow refuses before it starts, and then the real strategy."""

import json
import os
import socket

import tensorflow as tf

import tfdist_ext as tfd
from tfdist_ext.launch import reserve_ports


def refusal(**arguments: object) -> str:
    try:
        tfd.create_strategy("multi_worker_mirrored", **arguments)
    except tfd.StrategyError as error:
        return str(error)
    return "it was made"


def cluster(*addresses: str, **more: str) -> tfd.ClusterConfig:
    task = tfd.Task("worker", len(addresses) - 1)
    return tfd.ClusterConfig(jobs={"worker": addresses}, task=task, **more)


with reserve_ports(2) as (port, taken), socket.socket() as other:
    other.bind(("127.0.0.1", taken))
    other.listen()
    result = {
        "in_use": refusal(cluster=cluster(f"127.0.0.1:{taken}")),
        "rpc_layer": refusal(cluster=cluster(f"127.0.0.1:{port}", rpc_layer="http")),
    }
    os.environ["TF_CONFIG"] = cluster(f"127.0.0.1:{port}").to_tf_config()
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    strategy = tfd.create_strategy(cluster=resolver)
    result["sum"] = float(strategy.reduce("SUM", strategy.run(lambda: tf.constant(7.0)), axis=None))
    result["same_resolver"] = strategy.cluster_resolver is resolver
    result["explanation"] = str(tfd.explain(strategy)).splitlines()
print("RESULT", json.dumps(result), flush=True)
