"""The manifests of `tfdist kubernetes`: valid, and played with a process for each pod."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import namespaces
import pytest
from conftest import Result, assert_equal, result_in, training
from kubernetes_pods import played

from tfdist_ext.launch.schedulers.job_file import Job
from tfdist_ext.launch.schedulers.manifests import manifests

pytestmark = pytest.mark.timeout(280)
on_hosts = pytest.mark.skipif(bool(namespaces.WHY_NOT), reason=namespaces.WHY_NOT or "-")

EPOCHS, STEPS = 3, 8


def job(command: list[str] | None = None, **keys: Any) -> Job:
    settings = {"image": "train:1", **keys.pop("kubernetes", {})}
    keys.setdefault("nodes", 2)
    return Job(
        "train",
        tuple(command or ["python", "train.py"]),
        scheduler={"kubernetes": settings},
        **keys,
    )


@on_hosts
def test_a_worker_that_is_killed_comes_back(
    tmp_path: Path, undisturbed: Callable[[int, int], Result]
) -> None:
    documents = manifests(job(training(tmp_path, EPOCHS, STEPS, 0.1)))
    with played(documents, tmp_path, 6) as pods:
        pods.until("train-1", "STEP 10\n")
        pods.kill("train-1")
        state = pods.until_ended()
        print(pods.ends)
        assert state == "Complete", pods._told("")
        assert pods.ends[:2] == [("train-1", 137), ("train-0", 138)]
        assert pods.controller.counted == {0: 1, 1: 1}
    assert_equal(result_in(tmp_path), undisturbed(EPOCHS, STEPS))


@on_hosts
def test_a_worker_that_is_preempted_is_not_counted(
    tmp_path: Path, undisturbed: Callable[[int, int], Result]
) -> None:
    documents = manifests(job(training(tmp_path, EPOCHS, STEPS, 0.1), max_restarts=0, grace=20))
    with played(documents, tmp_path, 6) as pods:
        pods.until("train-1", "STEP 5\n")
        pods.evict("train-1")
        assert pods.until_ended() == "Complete"
        assert sorted(pods.ends[:2]) == [("train-0", 143), ("train-1", 143)]
        assert not pods.controller.counted
        assert "STEP 1\n" not in pods.logs["train-0"][1].read_text()  # it goes on
    assert_equal(result_in(tmp_path), undisturbed(EPOCHS, STEPS))


@on_hosts
def test_a_permanent_failure_ends_all(tmp_path: Path) -> None:
    script = 'if [ "$JOB_COMPLETION_INDEX" = 1 ]; then exit 3; fi; sleep 60'
    with played(manifests(job(["sh", "-c", script])), tmp_path, 2) as pods:
        assert pods.until_ended(20) == "Failed"
        assert pods.controller.reason == "PodFailurePolicy"
        assert pods.ends == [("train-1", 3), ("train-0", 143)]


@on_hosts
@pytest.mark.parametrize("killed", ["train-chief-0-0", "train-ps-0-0", "train-worker-0-1"])
def test_all_roles(killed: str, tmp_path: Path) -> None:
    """What holds the state of the training takes all with it; a worker comes back alone."""
    documents = manifests(job(training(tmp_path, 4, STEPS, 0.1), ps=1, evaluator=True))
    with played(documents, tmp_path, 12) as pods:
        pods.until("train-chief-0-0", "STEP 10\n")
        pods.kill(killed)
        state = pods.until_ended()
        print(pods.ends)
        assert state == "Completed", pods._told("")
        assert pods.controller.restarts == (0 if "worker" in killed else 1)
        assert pods.ends[0] == (killed, 137)
    assert result_in(tmp_path)["iterations"] == 4 * STEPS


@on_hosts
def test_a_chief_and_workers(tmp_path: Path, undisturbed: Callable[[int, int], Result]) -> None:
    documents = manifests(
        job(training(tmp_path, EPOCHS, STEPS, 0.1), nodes=1, chief=True, grace=20)
    )
    with played(documents, tmp_path, 8) as pods:
        pods.until("train-chief-0-0", "STEP 5\n")
        pods.evict("train-worker-0-0", disrupted=True)
        pods.until("train-chief-0-0", "STEP 12\n")
        assert not pods.controller.restarts
        pods.kill("train-worker-0-0")
        assert pods.until_ended() == "Completed", pods._told("")
        print(pods.ends)
        assert pods.controller.restarts == 1
    assert_equal(result_in(tmp_path), undisturbed(EPOCHS, STEPS))
