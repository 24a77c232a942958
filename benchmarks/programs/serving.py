"""Runs the worker and ps tasks of a cluster, in the same way for all methods."""

import json
import os

import tensorflow as tf


def serve() -> None:
    """Serve for ever, in a task that is not the coordinator."""
    config = json.loads(os.environ["TF_CONFIG"])
    task = config["task"]
    if task["type"] != "chief":
        spec = tf.train.ClusterSpec(config["cluster"])
        tf.distribute.Server(spec, task["type"], task["index"], protocol="grpc").join()
