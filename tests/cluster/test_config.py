"""ClusterConfig: what is valid, what it promises, and that nothing else gets in."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from tfdist_ext.cluster import ClusterConfig, Task
from tfdist_ext.errors import ClusterConfigError

WORKERS: dict[str, tuple[str, ...]] = {"worker": ("a:1", "b:1", "c:1")}
FULL: dict[str, tuple[str, ...]] = {
    "chief": ("c:1",),
    "worker": ("w:1", "w:2"),
    "ps": ("p:1", "p:2"),
    "evaluator": ("e:1",),
}


def test_tasks_are_in_the_order_of_roles() -> None:
    config = ClusterConfig(FULL, Task("ps", 1))
    assert (config.address, config.num_tasks) == ("p:2", 6)
    names = " ".join(str(task) for task in config.tasks())
    assert names == "chief:0 worker:0 worker:1 ps:0 ps:1 evaluator:0"


GOOD = (
    # (why it is valid, cluster, task, task read)
    ("digits are an index", {"worker": ["a:1", "b:1"]}, ("worker", "1"), ("worker", 1)),
    ("IPv6 in brackets", {"worker": ["[2001:db8::1]:2222"]}, ("worker", 0), None),
    ("IPv6 with a zone", {"worker": ["[fe80::1%eth0]:2222"]}, ("worker", 0), None),
    ("one host, two ports", {"worker": ["a:1"], "ps": ["a:2"]}, ("ps", 0), None),
    ("a chief alone", {"chief": ["a:1"]}, ("chief", 0), None),
    ("chief and evaluator", {"chief": ["a:1"], "evaluator": ["e:1"]}, ("evaluator", 0), None),
    ("an evaluator outside", {"worker": ["a:1"]}, ("evaluator", 0), None),
)


@pytest.mark.parametrize(("cluster", "task", "read"), [row[1:] for row in GOOD], ids=[
    row[0].replace(" ", "-") for row in GOOD
])  # fmt: skip
def test_valid_tf_config_round_trips(cluster: Any, task: Any, read: Any) -> None:
    text = json.dumps({"cluster": cluster, "task": {"type": task[0], "index": task[1]}})
    config = ClusterConfig.from_tf_config(text)
    assert config.jobs == {name: tuple(given) for name, given in cluster.items()}
    assert config.task == Task(*(read or task))
    assert config.source == "TF_CONFIG"
    assert ClusterConfig.from_tf_config(config.to_tf_config()) == config


def test_keys_of_estimators_and_google_cloud_are_ignored() -> None:
    task = {"type": "worker", "index": 0, "trial": "1", "cloud": "f3a0"}
    for protocol in (None, "grpc"):
        others = {"environment": "cloud", "job": {"args": []}, "rpc_layer": protocol}
        value = {"cluster": {"worker": ["a:1"]}, "task": task, **others}
        config = ClusterConfig.from_tf_config(json.dumps(value))
        assert config == ClusterConfig({"worker": ("a:1",)}, Task("worker", 0))


BAD_ARGUMENTS: tuple[tuple[Any, Any, str], ...] = (
    # (jobs, task, fragment of the message)
    ({7: ("a:1",)}, Task("worker", 0), "has a job"),
    (WORKERS, ("worker", 0), "task must be a Task"),
    (WORKERS, Task("worker", 10**5000), "must be from 0 to 2"),
)


@pytest.mark.parametrize(("jobs", "task", "fragment"), BAD_ARGUMENTS)
def test_invalid_arguments_are_refused(jobs: Any, task: Any, fragment: str) -> None:
    with pytest.raises(ClusterConfigError) as caught:
        ClusterConfig(jobs, task)
    assert str(caught.value).startswith("ClusterConfig: ")
    assert fragment in str(caught.value)
    assert len(str(caught.value)) < 400


def test_for_task_changes_only_the_task() -> None:
    config = ClusterConfig(FULL, Task("worker", 0), source="a test")
    other = config.for_task("ps", 1)
    assert other.task == Task("ps", 1)
    assert other.address == "p:2"
    assert (other.jobs, other.source) == (config.jobs, "a test")
    assert config.task == Task("worker", 0)
    with pytest.raises(ClusterConfigError, match=r"a test: task\.index must be from 0"):
        config.for_task("ps", 2)


CHIEFS = (
    # (jobs, task, is it the chief, why)
    (WORKERS, ("worker", 0), True, "worker 0 where there is no chief"),
    (FULL, ("chief", 0), True, "the chief itself"),
    (FULL, ("worker", 0), False, "worker 0 beside a chief"),
    (FULL, ("evaluator", 0), False, "the evaluator"),
    ({"worker": ("a:1",), "ps": ("p:1",)}, ("ps", 0), False, "ps 0 without a chief"),
)


@pytest.mark.parametrize(("jobs", "task", "expected", "why"), CHIEFS)
def test_is_chief(jobs: Any, task: tuple[str, int], expected: bool, why: str) -> None:
    assert ClusterConfig(jobs, Task(*task)).is_chief is expected, why


def test_config_is_immutable() -> None:
    config = ClusterConfig(FULL, Task("worker", 0))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.task = Task("worker", 1)  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.task.index = 1  # type: ignore[misc]
    jobs: Any = config.jobs
    for change in (lambda: jobs.__setitem__("worker", ()), jobs.popitem, jobs.clear):
        with pytest.raises(TypeError, match="read-only"):
            change()
    assert config.jobs == FULL
