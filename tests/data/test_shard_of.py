"""The shard of a task: from what TensorFlow and this package know about it."""

from __future__ import annotations

import pytest
import tensorflow as tf

import tfdist_ext as tfd
from tfdist_ext.cluster import ClusterConfig, Task
from tfdist_ext.data import DataError, Shard
from tfdist_ext.testing import run_tasks

pytestmark = pytest.mark.usefixtures("four_cpus")

WITH_CHIEF = {"chief": ("a:1",), "worker": ("b:1", "", "c:1"), "evaluator": ("e:1",)}
WITH_PS = {"chief": ("a:1",), "worker": ("b:1", "c:1"), "ps": ("d:1",)}


@pytest.mark.parametrize(
    ("jobs", "task", "shard"),
    [
        pytest.param({"worker": ("b:1", "c:1")}, Task("worker", 1), (1, 2), id="workers"),
        pytest.param(WITH_CHIEF, Task("chief", 0), (0, 3), id="the chief is first"),
        pytest.param(WITH_CHIEF, Task("worker", 0), (1, 3), id="a worker after the chief"),
        pytest.param(WITH_CHIEF, Task("worker", 2), (2, 3), id="an index that is not listed"),
        pytest.param(WITH_CHIEF, Task("evaluator", 0), (0, 1), id="evaluates on everything"),
        pytest.param(WITH_PS, Task("worker", 1), (1, 2), id="beside parameter servers"),
        pytest.param(WITH_PS, Task("chief", 0), (0, 1), id="a coordinator hands out everything"),
    ],
)
def test_of_a_cluster(jobs: dict[str, tuple[str, ...]], task: Task, shard: tuple) -> None:
    assert Shard.of(ClusterConfig(jobs, task)) == Shard(*shard)


def test_readers_of_a_cluster_are_disjoint_and_complete() -> None:
    cluster = ClusterConfig(WITH_CHIEF, Task("chief", 0))
    readers = [task for task in cluster.tasks() if task.type != "evaluator"]
    shards = [Shard.of(cluster.for_task(task.type, task.index)) for task in readers]
    assert shards == [Shard(i, 3) for i in range(3)]


def test_a_parameter_server_reads_nothing() -> None:
    with pytest.raises(
        DataError, match=r"task must be one that reads data .*got ps:0\. Ask for a shard"
    ):
        Shard.of(ClusterConfig(WITH_PS, Task("ps", 0)))


def test_of_an_input_context() -> None:
    context = tf.distribute.InputContext(
        num_input_pipelines=3, input_pipeline_id=2, num_replicas_in_sync=6
    )
    assert Shard.of(context) == Shard(2, 3)


def test_of_strategies_in_one_process() -> None:
    assert Shard.of(tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])) == Shard(0, 1)
    assert Shard.of(tf.distribute.get_strategy()) == Shard(0, 1)


def test_of_a_shard_and_of_nothing() -> None:
    assert Shard.of(Shard(1, 2)) == Shard(1, 2)
    with pytest.raises(DataError, match=r"ClusterConfig or a tf.*got 'worker'"):
        Shard.of("worker")


def _without_a_cluster() -> str:
    return str(Shard.of(tf.distribute.MultiWorkerMirroredStrategy()))


@pytest.mark.long
def test_of_a_multi_worker_strategy() -> None:
    """In a process of its own: the strategy is the first thing that TensorFlow makes."""
    assert run_tasks(_without_a_cluster, None) == {"process": "shard 0 of 1"}


def _of_this_worker() -> str:
    return str(Shard.of(tfd.create_strategy()))


def test_of_each_worker_of_a_real_cluster() -> None:
    shards = run_tasks(_of_this_worker, 2)
    assert shards == {"worker:0": "shard 0 of 2", "worker:1": "shard 1 of 2"}
