"""The plan of a run: its tasks, their commands and addresses, and what is refused."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from unittest import mock

import pytest

from tfdist_ext.cluster import ClusterConfig
from tfdist_ext.errors import LaunchError
from tfdist_ext.launcher.plan import local_plan

ENV = {"PATH": "/bin"}
COMMAND = ["python", "train.py"]


def found(program, path=None):
    assert path == "/bin"  # the PATH of the tasks, not of this process
    return f"/bin/{program}" if program in ("python", "run-it") else None


def plan(command=COMMAND, *, env=ENV, which=found, **options):
    with mock.patch("shutil.which", which), local_plan(command, env=env, **options) as planned:
        return planned


def cluster_of(task):
    return json.loads(task.env["TF_CONFIG"])["cluster"]


@pytest.mark.parametrize(
    ("options", "names", "coordinator", "reason"),
    [
        ({}, ["worker:0"], None, "one worker is the least"),
        ({"workers": 3}, ["worker:0", "worker:1", "worker:2"], None, "indices start at 0"),
        ({"workers": 0, "chief": True}, ["chief:0"], None, "a chief trains too"),
        (
            {"workers": 2, "ps": 1},
            ["chief:0", "worker:0", "worker:1", "ps:0"],
            "chief:0",
            "parameter servers bring their coordinator, whose end is the end",
        ),
        (
            {"workers": 1, "chief": True, "ps": 2},
            ["chief:0", "worker:0", "ps:0", "ps:1"],
            "chief:0",
            "a chief that was asked for is not doubled",
        ),
        ({"workers": 1, "evaluator": True}, ["worker:0", "evaluator:0"], None, "comes last"),
    ],
)
def test_plan_has_the_tasks_of_the_options(options, names, coordinator, reason):
    planned = plan(**options)
    assert [task.name for task in planned.tasks] == names, reason
    assert planned.coordinator == coordinator, reason
    for task in planned.tasks:
        config = ClusterConfig.from_tf_config(task.env["TF_CONFIG"])
        assert str(config.task) == task.name
        assert task.argv == ("python", "train.py")


def test_tasks_have_different_addresses():
    planned = plan(workers=2, ps=1)
    cluster = cluster_of(planned.tasks[0])
    addresses = [address for job in cluster.values() for address in job]
    assert len(set(addresses)) == 4
    assert all(re.fullmatch(r"127\.0\.0\.1:\d+", address) for address in addresses)
    assert all(cluster_of(task) == cluster for task in planned.tasks)


def test_only_the_evaluator_sees_the_evaluator():
    worker, evaluator = plan(workers=1, evaluator=True).tasks
    assert [*cluster_of(worker)] == ["worker"]
    assert [*cluster_of(evaluator)] == ["worker", "evaluator"]
    assert cluster_of(evaluator)["worker"] == cluster_of(worker)["worker"]


def test_log_files_are_named_after_the_tasks():
    logs = [task.log_file for task in plan(workers=2, log_dir="logs").tasks]
    assert logs == [Path("logs/worker-0.log"), Path("logs/worker-1.log")]
    assert plan().tasks[0].log_file is None


@pytest.mark.parametrize(
    ("command", "options", "words"),
    [
        ([], {}, ["no command", "after --", "tfdist run"]),
        (COMMAND, {"workers": 0}, ["leaves no task that trains", "--workers 1"]),
        (COMMAND, {"ps": -2}, ["--ps", "-2"]),
        (COMMAND, {"workers": 0, "ps": 1}, ["--ps 1 needs workers", "Add --workers"]),
        (COMMAND, {"ps": 1, "chief": False}, ["--ps 1 needs a chief", "coordinator"]),
        (["pyhton", "x"], {}, ["'pyhton'", "Check its path"]),
        (["train.py", "--a"], {}, ["'train.py'", "-- python train.py"]),
    ],
)
def test_invalid_options_are_refused_with_advice(command, options, words):
    with pytest.raises(LaunchError) as caught:
        plan(command, **options)
    for word in words:
        assert word in str(caught.value)


def test_python_not_on_path_is_the_current_interpreter():
    planned = plan(["python3", "x.py"], env={"PATH": ""}, which=lambda name, path=None: None)
    assert planned.tasks[0].argv == (sys.executable, "x.py")
