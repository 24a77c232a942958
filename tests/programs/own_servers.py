"""Servers of a small parameter server cluster in this process, for programs that need no others."""

import tensorflow as tf

from tfdist_ext.launcher.resources import reserve_ports


def serve(ps: int) -> tuple[tf.train.ClusterSpec, list[tf.distribute.Server]]:
    """(cluster of one worker and `ps` parameter servers, its servers: they serve while kept)."""
    with reserve_ports(1 + ps) as ports:
        addresses = [f"127.0.0.1:{port}" for port in ports]
        cluster = tf.train.ClusterSpec({"worker": addresses[:1], "ps": addresses[1:]})
        return cluster, [
            tf.distribute.Server(cluster, job_name=job, task_index=index, protocol="grpc")
            for job, tasks in cluster.as_dict().items()
            for index in range(len(tasks))
        ]
