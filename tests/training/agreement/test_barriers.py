"""A worker that leaves, dies or makes another call is named to the others, and within seconds."""

from __future__ import annotations

import json
import re
import signal
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from real_tasks import Tasks, tasks

SECONDS = (
    15.0  # on a machine that is busy; without this the others wait for 10 to 40 s, or for ever
)


def two_workers(folder: Path, event: str, victim: int = 1) -> AbstractContextManager[Tasks]:
    words = ("worker_leaves.py", event, str(victim), str(folder))
    return tasks(*words, folder=folder, workers=2, ps=0)


def train(cluster: Tasks) -> list[int]:
    names = ["worker:0", "worker:1"]
    cluster.start(*names)
    return [cluster.status(name, 120.0) for name in names]


def error_of(cluster: Tasks, name: str) -> str:
    found = re.findall(r"^tfdist_ext\.errors\.PeerError: (.*)$", cluster.log(name), re.MULTILINE)
    assert found, cluster.log(name)[-3000:]
    return str(found[-1])


@pytest.mark.parametrize(
    ("event", "victim", "status", "says"),
    [
        ("leaves", 1, 0, r"worker:1 left at \d\d:\d\d:\d\d: its script ended"),
        ("fails", 0, 1, r"worker:0 failed at \d\d:\d\d:\d\d: RuntimeError: no such file: data.tf"),
        ("SIGKILL", 1, -signal.SIGKILL, r"worker:1 \(127.0.0.1:\d+\) is gone: nothing listens"),
    ],
)
def test_error_names_the_worker_that_is_gone_and_the_last_checkpoint(
    tmp_path: Path, event: str, victim: int, status: int, says: str
) -> None:
    other = 1 - victim
    with two_workers(tmp_path, event, victim) as cluster:
        statuses = train(cluster)
        error = error_of(cluster, f"worker:{other}")
        assert re.match(says, error), error
        # The victim may be ahead of the other worker, which then waits in an earlier collective.
        where = r"\(epoch (3, before its first step|2, [^)]+)\)"
        assert re.search(rf"worker:{other} is in fit {where}, which needs every worker", error)
        assert "epoch-00002.safetensors" in error or "checkpoints on the chief" in error
        assert cluster.seconds_after(f"worker:{victim}", f"worker:{other}") < SECONDS
        assert (statuses[other], statuses[victim]) == (1, status)


@pytest.mark.long("1")
@pytest.mark.parametrize("victim", [0, 1])
def test_a_frozen_worker_is_named(tmp_path: Path, victim: int) -> None:
    """Worker 0 keeps the store, so the other one has to notice by itself."""
    with two_workers(tmp_path, "SIGSTOP", victim) as cluster:
        cluster.start("worker:0", "worker:1")
        cluster.wait_for(f"worker:{victim}", "NOW", 90.0)
        other = f"worker:{1 - victim}"
        assert cluster.status(other, 40.0) == 1
        said = rf"worker:{victim} \(127\.0\.0\.1:\d+\) has not answered for 9 s"
        assert re.match(said, error_of(cluster, other))


def test_different_calls_are_named_on_both_workers(tmp_path: Path) -> None:
    with two_workers(tmp_path, "evaluates") as cluster:
        assert train(cluster) == [1, 1]
        # The chief names its last checkpoint, and the others the folder.
        where = r" (?:The last checkpoint is|Checkpoints go to) "
        errors = [re.split(where, error_of(cluster, f"worker:{n}"))[0] for n in range(2)]
    for error in errors:
        assert error == errors[0]
        assert "worker:1 in evaluate inside fit" in error
        assert "worker:0 in fit (epoch 3, before its first step)" in error


def test_ended_training_thread_of_a_live_process_is_named(tmp_path: Path) -> None:
    with two_workers(tmp_path, "leaves its thread") as cluster:
        cluster.start("worker:0", "worker:1")
        error = cluster.wait_for("worker:0", r"PeerError: (worker:1 left at .*)", 90.0)[1]
        # SIGTERM is as it was before TensorFlow, which would take note of it and continue.
        caught = int(cluster.wait_for("worker:1", r"SigCgt:\s*(\w+)")[1], 16)
        assert not caught & 1 << signal.SIGTERM - 1
    assert "its training thread has ended; worker:0 is in fit" in error
    assert "on every worker, not only on one" in error


@pytest.mark.long
def test_slow_worker_is_reported_and_different_calls_are_refused(tmp_path: Path) -> None:
    """The one is slow for longer than anything above takes; its own handler gets the SIGTERM."""
    with two_workers(tmp_path, "slow") as cluster:
        assert train(cluster) == [0, 0]
        results = [json.loads(cluster.wait_for(f"worker:{n}", "RESULT (.*)")[1]) for n in (0, 1)]
        assert re.search(
            r"worker:0: waiting in fit \(epoch 3, before its first step\) for 10 s for worker:1,"
            r" since \d\d:\d\d:\d\d in callbacks, inside fit",
            cluster.log("worker:0"),
        )
    for result in results:
        assert result["epochs"] == 4
        assert "is evaluate on worker 0 and save on worker 1" in result["different_calls"]
        assert result["rows"] == 50  # the cluster works after it
        assert result["handler"] is True
    assert [result["own_handler"] for result in results] == [[], [True]]
