"""Strategies of clusters, in processes of their own with hard limits."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl import flags
from warm_programs import run_program

import tfdist_ext as tfd
from tfdist_ext import ClusterConfig, Task
from tfdist_ext.launcher.resources import reserve_ports
from tfdist_ext.strategies import several_machines
from tfdist_ext.strategies.owned_sums import sums_of
from tfdist_ext.testing import run_tasks

# Reports the missing peer after half a second instead of ten.
WAITS_FOR_PEERS = """
import tfdist_ext as tfd
from tfdist_ext.cluster import liveness
liveness.FIRST_AFTER = 0.5
tfd.create_strategy({name!r}, wait=1.5)
"""


@pytest.mark.tfdist_cluster(worker=2, timeout=90)
def test_two_real_workers_sum_over_both_with_each_strategy(tfdist_cluster: Any) -> None:
    index = tfdist_cluster.task.index
    strategy = tfd.create_strategy(communication="ring")
    assert isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)

    @tf.function
    def total() -> tf.Tensor:
        def step() -> tf.Tensor:
            context = tf.distribute.get_replica_context()
            return context.all_reduce("SUM", tf.constant(index + 1.0))

        return strategy.run(step)

    assert float(total()) == (0 + 1) + (1 + 1)
    text = str(tfd.explain(strategy)).splitlines()
    chief = ", the chief" if index == 0 else ""
    assert "because      TF_CONFIG describes a cluster (worker)" in text
    assert f"task         worker:{index}{chief}, in a cluster of 2 workers" in text
    assert "replicas     2 in sync, 1 of them on this task" in text
    assert "settings     communication = 'ring' from the call" in text
    # Workers of a machine share its cores.
    cores = os.cpu_count() or 1
    bound = len(os.sched_getaffinity(0)) < cores
    share = 0 if bound else max(1, cores // 2)  # 0: TensorFlow decides
    assert tf.config.threading.get_intra_op_parallelism_threads() == share
    said = f"threads      at most {share} in an operation on a CPU"
    assert (said in text) == bool(share)
    # The environment that was used is not among those passed over.
    assert not any("TF_CONFIG:" in line for line in text)
    # A strategy of one machine, made in a worker, stays on that worker.
    here = str(tfd.explain(tfd.create_strategy("one_device", alone=True))).splitlines()
    (device,) = [line for line in here if line.startswith("devices")]
    assert f"/job:worker/replica:0/task:{index}/device:CPU:0" in device
    # So do the variables of a custom strategy, also those beside others.
    custom = tfd.strategies.StrategyTemplate()
    with custom.scope():
        variable = tf.Variable(1.0)
        with custom.extended.colocate_vars_with(variable):
            (copy,) = custom.copies(tf.Variable(0.0))
    assert copy.device == f"/job:worker/replica:0/task:{index}/device:CPU:0"
    # A second one, in the same process, with the options of TensorFlow's constructor.
    options = tf.distribute.experimental.CommunicationOptions(
        bytes_per_pack=1 << 20,
        timeout_seconds=50.0,
        implementation=tf.distribute.experimental.CommunicationImplementation.RING,
    )
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    strategy = tfd.create_strategy(cluster_resolver=resolver, communication_options=options)
    assert strategy.cluster_resolver is resolver
    assert strategy.extended._communication_options is options
    assert sums_of(strategy).bucket_bytes == 1 << 20
    check_that_each_strategy_has_collectives_of_its_own()


def check_that_each_strategy_has_collectives_of_its_own() -> None:
    """As in a cross-validation, with models of other shapes and sums in other types."""
    x = np.arange(12, dtype="float32").reshape(4, 3) / 8
    narrow = {"gradient_dtype": "bfloat16"}
    options: list[dict[str, Any]] = [{}, narrow, {"shard_optimizer": True}, {}]
    strategies = [tfd.create_strategy(**option) for option in options]
    models, expected = [], []
    for units, strategy in enumerate(strategies, 1):
        layer = keras.layers.Dense(units, kernel_initializer="ones")
        plain = keras.Sequential([keras.Input((3,)), layer])
        plain.compile(keras.optimizers.SGD(0.25, momentum=0.5), "mse")
        models.append(tfd.distribute(keras.models.clone_model(plain), strategy))
        models[-1].compile(keras.optimizers.SGD(0.25, momentum=0.5), "mse")
        plain.fit(x, np.zeros((4, units)), batch_size=2, epochs=2, shuffle=False, verbose=0)
        expected.append(plain.get_weights())
    for _ in range(2):  # the models take turns
        for units, model in enumerate(models, 1):
            model.fit(x, np.zeros((4, units)), batch_size=2, shuffle=False, verbose=0)
    for model, weights, option in zip(models, expected, options, strict=True):
        tolerance = 1e-2 if option == narrow else 1e-6
        for found, wanted in zip(model.get_weights(), weights, strict=True):
            np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=tolerance)


def test_strategy_that_could_not_be_made_has_used_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[int] = []

    def create(first_key: int, **_: Any) -> tf.distribute.Strategy:
        keys.append(first_key)
        if len(keys) == 1:
            raise tf.errors.UnavailableError(None, None, "failed to connect")
        return tf.distribute.OneDeviceStrategy("CPU:0")

    monkeypatch.setattr(several_machines, "workers_strategy", create)
    monkeypatch.setattr(several_machines, "run_preflight", lambda *_, **__: None)
    monkeypatch.setattr(several_machines, "_next_key", 5001)
    cluster = ClusterConfig(jobs={"worker": ("localhost:2222",)}, task=Task("worker", 0))
    with pytest.raises(tf.errors.UnavailableError, match="failed to connect"):
        tfd.create_strategy(cluster=cluster)
    tfd.create_strategy(cluster=cluster)
    tfd.create_strategy(cluster=cluster)
    assert keys == [5001, 5001, 6001]


def _one_process() -> dict[str, Any]:
    """Logical CPUs, which need a TensorFlow that has not started; then a cluster."""
    tfd.flags.define_strategy_flags()
    flags.FLAGS(["program", "--logical_cpus=3"])
    result: dict[str, Any] = {}
    strategy = tfd.create_strategy()
    result["mirrored"] = str(tfd.explain(strategy)).splitlines()
    replica = tf.distribute.get_replica_context
    numbers = strategy.run(lambda: replica().replica_id_in_sync_group + 1)
    result["sum"] = int(strategy.reduce("SUM", numbers, axis=None))
    flags.FLAGS["logical_cpus"].value = None

    with reserve_ports(4) as ports:
        addresses = [f"127.0.0.1:{port}" for port in ports]
        jobs = {"chief": addresses[:1], "worker": addresses[1:2], "ps": addresses[2:]}
        spec = tf.train.ClusterSpec(jobs)
        _servers.extend(
            tf.distribute.Server(spec, job_name=job, task_index=index, protocol="grpc")
            for job, index in (("worker", 0), ("ps", 0), ("ps", 1))
        )
        cluster = ClusterConfig(jobs=jobs, task=Task("chief", 0))
        strategy = tfd.create_strategy(cluster=cluster, placement={".*": "sharded(2)"})
        with strategy.scope():
            variable = tf.Variable(tf.reshape(tf.range(8.0), [4, 2]))
        result["shards"] = [[v.device, v.numpy().tolist()] for v in variable.variables]
        result["parameter_server"] = str(tfd.explain(strategy)).splitlines()
        result["classes"] = [cls.__name__ for cls in type(strategy).__mro__]
        # The devices of peers are listed now too; a strategy on this machine must not take them.
        result["here"] = len(tfd.create_strategy("mirrored").extended.worker_devices)
    return result


_servers: list[Any] = []  # a server blocks where it is deleted


def test_logical_cpus_and_a_real_parameter_server() -> None:
    result = run_tasks(_one_process, None)["process"]
    assert result["sum"] == 1 + 2 + 3
    assert "because      3 logical CPUs on this machine, no cluster" in result["mirrored"]
    assert "settings     logical_cpus = 3 from flags" in result["mirrored"]
    assert "replicas     3 in sync" in result["mirrored"]

    assert "ParameterServerStrategyV2" in result["classes"]
    assert result["shards"] == [
        ["/job:ps/replica:0/task:0/device:CPU:0", [[0.0, 1.0], [2.0, 3.0]]],
        ["/job:ps/replica:0/task:1/device:CPU:0", [[4.0, 5.0], [6.0, 7.0]]],
    ]
    text = result["parameter_server"]
    assert "because      ClusterConfig has ps tasks (chief, worker, ps)" in text
    assert "settings     placement = {'.*': 'sharded(2)'} from the call" in text
    assert "task         chief:0, the chief, in a cluster of 1 chief, 1 worker, 2 ps" in text
    assert "devices      variables on 2 ps, computing on 1 worker" in text
    assert result["here"] == 3


@pytest.mark.parametrize(
    ("name", "jobs", "me", "missing"),
    [
        ("multi_worker_mirrored", {"worker": 2}, Task("worker", 0), "worker:1"),
        ("parameter_server", {"chief": 1, "worker": 1, "ps": 1}, Task("ps", 0), "chief:0"),
    ],
)
def test_a_peer_that_does_not_come_within_wait_is_named(
    name: str, jobs: dict[str, int], me: Task, missing: str, tmp_path: Path
) -> None:
    with reserve_ports(sum(jobs.values())) as ports:
        free = iter(ports)
        cluster = {job: [f"127.0.0.1:{next(free)}" for _ in range(n)] for job, n in jobs.items()}
        config = ClusterConfig(jobs={job: tuple(at) for job, at in cluster.items()}, task=me)
        done = run_program(
            [sys.executable, "-c", WAITS_FOR_PEERS.format(name=name)],
            tmp_path,
            timeout=60,
            env={**os.environ, "TF_CONFIG": config.to_tf_config()},
        )
    assert done.returncode == 1
    error, link = done.stderr.splitlines()[-2:]
    assert "StrategyError" in error
    assert link.endswith('docs/error_messages.md, section "clusters and strategies"')
    if me.type != "ps":
        assert error.split("Error: ")[1].startswith("tasks of TF_CONFIG are missing after 1.5 s")
    assert "are missing after 1.5 s (wait): no answer from" in error
    assert missing in error
    waits = next(line for line in done.stderr.splitlines() if ": waiting for " in line)
    assert waits.startswith(f"{me}: waiting for {missing} (127.0.0.1:")
    assert "Check that it is started, that its address in TF_CONFIG is right on every task" in waits


def test_rules_of_a_settings_file_are_checked_before_the_wait(tmp_path: Path) -> None:
    """No server of this cluster exists."""
    jobs = {job: (f"127.0.0.1:{n}",) for n, job in enumerate(("chief", "worker", "ps"), 1)}
    cluster = tfd.ClusterConfig(jobs=jobs, task=tfd.Task("chief", 0))
    path = tmp_path / "strategy.toml"
    path.write_text('[strategy]\nname = "parameter_server"\n[strategy.placement]\n"a" = "task 9"\n')
    message = "'a' cannot be on task 9: the cluster has 1 ps task"
    with pytest.raises(tfd.PlacementError, match=message):
        tfd.create_strategy(config=path, cluster=cluster)
