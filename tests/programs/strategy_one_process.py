"""What needs a TensorFlow that has not started: logical CPUs, then the traps of a late start."""

import json
import sys

from absl import flags

import tfdist_ext as tfd

tfd.flags.define_strategy_flags()
flags.FLAGS([sys.argv[0], "--logical_cpus=3"])

import tensorflow as tf  # noqa: E402

from tfdist_ext.launch import reserve_ports  # noqa: E402

result: dict[str, object] = {}
strategy = tfd.create_strategy()
result["mirrored"] = str(tfd.explain(strategy)).splitlines()
per_replica = strategy.run(lambda: tf.distribute.get_replica_context().replica_id_in_sync_group + 1)
result["sum"] = int(strategy.reduce("SUM", per_replica, axis=None))

flags.FLAGS["logical_cpus"].value = None

with reserve_ports(5) as ports:
    addresses = [f"127.0.0.1:{port}" for port in ports]
    late = tfd.ClusterConfig(jobs={"worker": tuple(addresses[:1])}, task=tfd.Task("worker", 0))
    try:
        tfd.create_strategy("multi_worker_mirrored", cluster=late)
    except tfd.StrategyError as error:
        result["late"] = str(error)

    jobs = {"chief": addresses[1:2], "worker": addresses[2:3], "ps": addresses[3:5]}
    spec = tf.train.ClusterSpec(jobs)
    servers = [
        tf.distribute.Server(spec, job_name=job, task_index=index, protocol="grpc")
        for job, index in (("worker", 0), ("ps", 0), ("ps", 1))
    ]
    cluster = tfd.ClusterConfig(jobs=jobs, task=tfd.Task("chief", 0))
    partitioner = tf.distribute.experimental.partitioners.FixedShardsPartitioner(2)
    strategy = tfd.create_strategy(cluster=cluster, partitioner=partitioner)
    with strategy.scope():
        variable = tf.Variable(tf.reshape(tf.range(8.0), [4, 2]))
    result["shards"] = [[v.device, v.numpy().tolist()] for v in variable.variables]
    result["parameter_server"] = str(tfd.explain(strategy)).splitlines()
    result["classes"] = [cls.__name__ for cls in type(strategy).__mro__]
    # The devices of peers are listed now too; a strategy on this machine must not take them.
    result["here"] = len(tfd.create_strategy("mirrored").extended.worker_devices)
print("RESULT", json.dumps(result), flush=True)
