"""create_strategy as its users meet it; this process has four logical CPUs and no GPU."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf

import tfdist_ext as tfd
from tfdist_ext.cluster.jobs import ClusterDescription
from tfdist_ext.strategies import factory
from tfdist_ext.strategies.explanation import evaluates
from tfdist_ext.strategies.factory import Environment, choose

TWO_WORKERS = {"worker": ["127.0.0.1:21", "127.0.0.1:22"]}
MADE = [
    ("default", {}, type(tf.distribute.get_strategy()), 1),
    ("one_device", {"devices": "CPU:1"}, tf.distribute.OneDeviceStrategy, 1),
    (
        "mirrored",
        {"devices": ["/cpu:3", "device:Cpu:1", "/job:localhost/replica:0/task:0/device:CPU:2"]},
        tf.distribute.MirroredStrategy,
        3,
    ),
    (
        "central_storage",
        {"devices": ["CPU:1", "CPU:2"], "parameter_device": "CPU:3"},
        tf.distribute.experimental.CentralStorageStrategy,
        2,
    ),
]


def _refused(name: str = "auto", **arguments: Any) -> str:
    with pytest.raises(tfd.TfDistError) as error:
        tfd.create_strategy(name, **arguments)
    return str(error.value)


def _cluster(jobs: dict[str, list[str]], task: tuple[str, int]) -> tfd.ClusterConfig:
    return tfd.ClusterConfig(
        jobs={job: tuple(addresses) for job, addresses in jobs.items()}, task=tfd.Task(*task)
    )


OPTIONS = tf.distribute.experimental.CommunicationOptions()
PARTITIONER = tf.distribute.experimental.partitioners.MinSizePartitioner()
SERVERS = {"chief": ["h:1"], "worker": ["h:2"], "ps": ["h:3"]}
WITH_EVALUATOR = {**SERVERS, "evaluator": ["h:4"]}


@pytest.mark.parametrize(("name", "options", "kind", "replicas"), MADE)
def test_the_strategy_is_tensorflows_own_object(
    name: str, options: dict[str, Any], kind: type, replicas: int
) -> None:
    strategy = tfd.create_strategy(name, **options)
    assert type(strategy) in (kind, *kind.__subclasses__())
    total = strategy.reduce("SUM", strategy.run(lambda: tf.constant(5.0)), axis=None)
    assert float(total) == 5.0 * replicas


def test_mirrored_reduces_with_the_given_operations() -> None:
    ops = tf.distribute.ReductionToOneDevice("CPU:1")
    strategy = tfd.create_strategy("mirrored", devices=2, cross_device_ops=ops)
    assert strategy.extended._cross_device_ops is ops
    assert "cross_device_ops = " in str(tfd.explain(strategy))


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        (
            "auto",
            {"owned_from": 3},
            ["'mirrored' has no option owned_from=3", "It is an option of placed."],
        ),
        ("one_device", {"devices": 2}, ["one_device takes one device, not CPU:0, CPU:1"]),
        ("mirrored", {"devices": 5}, ["do not exist: CPU:4. Dev", "pass logical_cpus=5 to create"]),
        ("mirrored", {"devices": 0}, ["must be an integer from 1 to 10000, got 0"]),
        ("mirrored", {"devices": {"CPU:0"}}, ["names or a number of devices, got {'CPU:0'}"]),
        ("mirrored", {"devices": ["CPU:0", "/cpu:0"]}, ["of mirrored name CPU:0 twice: ['CPU:0'"]),
        (
            "mirrored",
            {"devices": "/job:worker/replica:0/task:1/device:CPU:0"},
            ["do not exist: /job:worker/replica:0/task:1/device:CPU:0. Devices seen are CPU:0"],
        ),
        ("mirrored", {"logical_cpus": 2}, ["logical_cpus=2 is not possible: TensorFlow has"]),
        (
            "auto",
            {"cluster": _cluster(TWO_WORKERS, ("worker", 0)), "logical_cpus": 4},
            ["logical_cpus=4 is for strategies of one machine", "describes a cluster (worker)"],
        ),
        ("multi_worker_mirrored", {}, ["needs a cluster", "TF_CONFIG"]),
        (
            "multi_worker_mirrored",
            {"cluster": "a:1"},
            ["cluster='a:1' is neither a ClusterConfig nor"],
        ),
        (
            "multi_worker_mirrored",
            {"communication": "mpi"},
            ["communication='mpi' is not supported. Use 'auto', 'ring' or 'nccl'."],
        ),
        (
            "mirrored",
            {"cross_device_ops": "nccl"},
            ["cross_device_ops='nccl' is not a", "tf.distribute.HierarchicalCopyAllReduce()"],
        ),
        (
            "multi_worker_mirrored",
            {"communication": "ring", "communication_options": OPTIONS},
            ["without communication=, got ", "Pass the implementation in it."],
        ),
        (
            "multi_worker_mirrored",
            {"communication_options": "nccl"},
            ["communication_options must be a tf.distribute", "got 'nccl'"],
        ),
        (
            "auto",
            {"variable_partitioner": PARTITIONER, "cluster": _cluster(SERVERS, ("chief", 0))},
            ["no option variable_partitioner=", 'Use placement="balanced", which cuts large'],
        ),
        (
            "auto",
            {
                "cluster": _cluster(TWO_WORKERS, ("worker", 0)),
                "cluster_resolver": _cluster(TWO_WORKERS, ("worker", 0)),
            },
            ["cluster and cluster_resolver are the same option. Pass only one."],
        ),
        ("auto", {"wait": 0}, ["wait must be a number of seconds above 0, got 0"]),
        ("auto", {"alone": "yes"}, ["alone must be True or False, got 'yes'"]),
    ],
)
def test_wrong_options_are_refused(name: str, options: dict[str, Any], words: list[str]) -> None:
    message = _refused(name, **options)
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("name", "jobs", "task", "words"),
    [
        ("auto", TWO_WORKERS, ("worker", 0), ["before TensorFlow starts", "to the top"]),
        (
            "multi_worker_mirrored",
            WITH_EVALUATOR,
            ("chief", 0),
            ["has ps and evaluator tasks", "parameter_server"],
        ),
        (
            "auto",
            {"worker": ["h:1"], "evaluator": ["h:2"]},
            ("worker", 0),
            ["has evaluator tasks", "an evaluator without TF_CONFIG"],
        ),
        (
            "parameter_server",
            TWO_WORKERS,
            ("worker", 0),
            ["needs ps and worker tasks", "has 2 workers"],
        ),
    ],
)
def test_a_cluster_that_a_strategy_cannot_use_is_refused(
    name: str,
    jobs: dict[str, list[str]],
    task: tuple[str, int],
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = _cluster(jobs, task)
    of_argument = _refused(name, cluster=cluster)
    monkeypatch.setenv("TF_CONFIG", cluster.to_tf_config())
    for message in (of_argument, _refused(name)):
        for word in words:
            assert word in message


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("auto", {}),
        ("parameter_server", {"placement": "balanced"}),
    ],
)
def test_an_evaluator_gets_a_strategy_for_its_own_devices(
    name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = _cluster(WITH_EVALUATOR, ("evaluator", 0))
    monkeypatch.setenv("TF_CONFIG", cluster.to_tf_config())
    for arguments in ({}, {"cluster": cluster}):
        strategy = tfd.create_strategy(name, **arguments, **options)
        assert isinstance(strategy, tf.distribute.MirroredStrategy)
        assert strategy.num_replicas_in_sync == 4
        assert evaluates(strategy) is not None
        text = str(tfd.explain(strategy))
        assert "4 logical CPUs on this machine, evaluator:0 works by itself" in text
        assert "task         evaluator:0, outside a cluster of 1 chief, 1 worker, 1 ps" in text
    assert evaluates(tfd.create_strategy("mirrored", devices=2)) is None  # asked for by name


def test_a_strategy_of_one_machine_in_a_cluster_needs_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TF_CONFIG", _cluster(TWO_WORKERS, ("worker", 1)).to_tf_config())
    message = _refused("default")
    assert "'default' has replicas on this machine only" in message
    assert "TF_CONFIG lists 2 tasks" in message
    assert "create_strategy('multi_worker_mirrored')" in message
    assert "alone=True" in message
    text = str(tfd.explain(tfd.create_strategy("default", alone=True)))
    assert "alone = True from the call" in text
    # A cluster of one task is no other training; nor is an evaluator, whoever trains.
    for jobs, task in (({"worker": ["h:1"]}, ("worker", 0)), (WITH_EVALUATOR, ("evaluator", 0))):
        monkeypatch.setenv("TF_CONFIG", _cluster(jobs, task).to_tf_config())
        tfd.create_strategy("default")
    monkeypatch.setenv("TF_CONFIG", _cluster(WITH_EVALUATOR, ("chief", 0)).to_tf_config())
    assert "create_strategy('parameter_server')" in _refused("default")


def test_alone_means_the_devices_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = _cluster(TWO_WORKERS, ("worker", 1))
    monkeypatch.setenv("TF_CONFIG", cluster.to_tf_config())
    assert tfd.create_strategy(alone=True).num_replicas_in_sync == 4
    assert "cannot be combined with a cluster" in _refused(alone=True, cluster=cluster)
    assert "combined with the strategy 'parameter_server'" in _refused(
        "parameter_server", alone=True
    )


def test_a_strategy_made_elsewhere_is_looked_at_when_a_model_is_distributed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    template = tfd.strategies.StrategyTemplate(["CPU:0", "CPU:1"])
    monkeypatch.setenv("TF_CONFIG", _cluster(TWO_WORKERS, ("worker", 1)).to_tf_config())

    def build() -> keras.Model:
        return keras.Sequential([keras.Input([1]), keras.layers.Dense(1)])

    for strategy in (made, template, tf.distribute.OneDeviceStrategy("CPU:0")):
        with pytest.raises(tfd.StrategyError, match=type(strategy).__name__):
            tfd.distribute(build, strategy)
        with strategy.scope(), pytest.raises(tfd.StrategyError, match="on this machine only"):
            tfd.distribute(build)
    meant = tfd.create_strategy("one_device", alone=True)
    assert tfd.distribute(build, meant).strategy is meant


@pytest.mark.parametrize("name", ["auto", "mirrored"])
def test_a_wrong_tf_config_is_an_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    task = {"type": "worker", "index": -1}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": TWO_WORKERS, "task": task}))
    assert "TF_CONFIG: task.index must be" in _refused(name)
    monkeypatch.setenv("TF_CONFIG", "{bad")
    assert "TF_CONFIG: is not JSON" in _refused(name)
    assert tfd.create_strategy("one_device", alone=True).num_replicas_in_sync == 1


def test_the_default_strategy_is_refused_inside_another_ones_scope() -> None:
    outer = tfd.create_strategy("mirrored")
    with outer.scope():
        assert "outside the scope of MirroredStrategy." in _refused("default")
        inner = tfd.create_strategy("one_device")
    assert type(inner) is tf.distribute.OneDeviceStrategy


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[strategy", ["cannot be read as TOML"]),
        ("[stratgey]\nname = 'mirrored'", ["has no [strategy] table, only stratgey"]),
        ("[strategy]\nname = 'mirrored'\ndevises = 2", ['Did you mean "devices"?']),
        (
            "[strategy]\nname = 'miror'",
            ['Did you mean "mirrored"?', "name = 'miror' from"],
        ),
    ],
)
def test_a_wrong_settings_file_is_refused_by_its_path(
    tmp_path: Path, text: str, words: list[str]
) -> None:
    file = tmp_path / "f.toml"
    file.write_text(text)
    message = _refused(config=file)
    for word in (*words, str(file)):
        assert word in message


CPU, TWO_CPUS = ["CPU:0"], ["CPU:0", "CPU:1"]
GPU, TWO_GPUS = [*TWO_CPUS, "GPU:0"], [*CPU, "GPU:0", "GPU:1"]
TPU = "the environment names the TPU 't'"


def _described(task: str, *jobs: str) -> ClusterDescription:
    return ClusterDescription({job: (f"{job}:1",) for job in jobs}, tfd.Task(task, 0), "TF_CONFIG")


IN_WORKER = _described("worker", "worker")
IN_CHIEF = _described("chief", "chief", "worker", "ps")
IN_EVALUATOR = _described("evaluator", "chief", "worker", "ps", "evaluator")


@pytest.mark.parametrize(
    ("name", "known", "chosen", "because"),
    [
        ("auto", {"cluster": IN_WORKER}, "multi_worker_mirrored", "TF_CONFIG describes a cluster"),
        (
            "auto",
            {"cluster": IN_CHIEF},
            "parameter_server",
            "TF_CONFIG has ps tasks (chief",
        ),
        ("auto", {"cluster": IN_WORKER, "tpu": TPU}, "multi_worker_mirrored", "TF_CONFIG"),
        ("auto", {"tpu": TPU}, "tpu", "names the TPU 't'"),
        ("auto", {"tpu": TPU, "asked_for": 2}, "mirrored", "devices= asks for 2"),
        ("auto", {"asked_for": 1}, "one_device", "devices= asks for 1"),
        ("auto", {"devices": TWO_GPUS}, "mirrored", "2 GPUs on this machine"),
        ("auto", {"devices": GPU}, "one_device", "one GPU on this machine"),
        ("auto", {}, "mirrored", "2 logical CPUs on this machine, no cluster"),
        ("auto", {"devices": CPU}, "default", "one CPU on this machine"),
        ("parameter_server", {"cluster": IN_EVALUATOR}, "mirrored", "evaluator:0 works by itself"),
        ("multi_worker_mirrored", {"cluster": IN_EVALUATOR, "tpu": TPU}, "tpu", "names the TPU"),
        ("placed", {"cluster": IN_EVALUATOR}, "placed", "by name in the call"),
    ],
)
def test_the_most_specific_signal_wins(
    name: str,
    known: dict[str, Any],
    chosen: str,
    because: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    devices = known.pop("devices", None)

    def listed() -> Sequence[str]:
        # Listing devices starts TensorFlow, which a strategy for a cluster or a TPU forbids.
        assert not {"asked_for", "tpu"} & known.keys()
        assert chosen not in ("multi_worker_mirrored", "parameter_server")
        return devices or TWO_CPUS

    monkeypatch.setattr(factory, "seen_devices", listed)
    choice = choose(name, "the call", Environment(**known))
    assert choice.name == chosen
    assert because in choice.because
    assert not any(line.startswith(f"{chosen}:") for line in choice.passed_over)
