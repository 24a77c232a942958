"""Every task of a cluster with parameter servers ends by itself, and as the coordinator ended."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from event_files import scalars
from real_tasks import tasks

import tfdist_ext as tfd
from tfdist_ext.launcher.exit_codes import PREEMPTED, RESTART

pytestmark = pytest.mark.timeout(150)
WITHIN = 10.0  # seconds after the coordinator


def test_success_ends_every_task_with_0_and_the_evaluator_has_evaluated(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    servers = ["ps:0", "worker:0", "worker:1"]
    with tasks(
        "roles_fit.py", str(folder), folder=tmp_path, workers=2, ps=1, evaluator=True
    ) as cluster:
        cluster.start("chief:0", "evaluator:0", *servers)
        for name in ("chief:0", "evaluator:0", *servers):
            assert cluster.status(name, 90) == 0, cluster.log(name)[-3000:]
        for name in servers:
            assert cluster.seconds_after("chief:0", name) < WITHIN
            assert "is done\nrun returned None" in cluster.log(name)
        history = json.loads(cluster.wait_for("chief:0", "RESULT (.*)")[1])
        assert "run returned trained" in cluster.log("chief:0")
        evaluated = cluster.log("evaluator:0")
    assert "evaluator:0, outside a cluster of 1 chief, 2 workers, 1 ps" in evaluated
    assert evaluated.endswith("run returned None\n")
    # The same numbers as the chief's validation, which it did on the workers at the same states.
    found = scalars(folder / "evaluator")
    by_step = ["evaluation_accuracy_vs_iterations", "evaluation_loss_vs_iterations"]
    assert sorted(found) == ["epoch_accuracy", "epoch_loss", *by_step]
    for name in ("loss", "accuracy"):
        by_epoch = found[f"epoch_{name}"]
        assert 2 in by_epoch  # the last; those before may be removed before their turn
        for epoch, value in by_epoch.items():
            assert value == pytest.approx(history[f"val_{name}"][epoch], rel=1e-5)
        of_steps = found[f"evaluation_{name}_vs_iterations"]
        assert list(of_steps.values()) == list(by_epoch.values())


@pytest.mark.parametrize(
    ("failure", "status", "text"),
    [
        ("raise", 1, "no space left on device"),
        ("preempt", PREEMPTED, "training stopped by a signal. The last checkpoint is"),
    ],
)
def test_failure_of_the_coordinator_ends_every_server_with_138(
    tmp_path: Path, failure: str, status: int, text: str
) -> None:
    arguments = failure, str(tmp_path / "checkpoints")
    with tasks("roles_by_hand.py", *arguments, folder=tmp_path, workers=1, ps=1) as cluster:
        cluster.start("chief:0", "worker:0", "ps:0")
        assert cluster.status("chief:0") == status
        assert text in cluster.log("chief:0")
        for name in ("worker:0", "ps:0"):
            assert cluster.status(name, 20) == RESTART
            assert cluster.seconds_after("chief:0", name) < WITHIN
            assert cluster.log(name).endswith("has failed\n")


def test_servers_wait_for_a_late_coordinator_and_end_with_138_when_it_is_killed(
    tmp_path: Path,
) -> None:
    with tasks("roles_by_hand.py", "wait", folder=tmp_path, workers=2, ps=1) as cluster:
        cluster.start("worker:0", "worker:1", "ps:0")
        for name in ("worker:0", "worker:1", "ps:0"):
            cluster.wait_for(name, rf"{name}: waiting for chief:0 \(127.0.0.1:\d+\) for \d+ s")
        cluster.start("chief:0")
        assert cluster.wait_for("chief:0", "RESULT (.*)")[1] == "10.0"
        cluster.signal("worker:1", signal.SIGTERM)
        assert cluster.status("worker:1", 3) == -signal.SIGTERM
        cluster.signal("chief:0", signal.SIGKILL)
        for name in ("worker:0", "ps:0"):
            assert cluster.status(name, 20) == RESTART
            assert cluster.seconds_after("chief:0", name) < WITHIN
            assert cluster.log(name).endswith("is gone without a message: it crashed\n")


@pytest.mark.tfdist_cluster(worker=2, ps=2)
def test_each_task_may_have_one_core() -> None:
    """TensorFlow's servers hang in the first step then, unless they have two threads."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    tfd.run(_train)


def _train() -> None:
    strategy = tfd.create_strategy(placement={".*kernel": "sharded(2)"})
    model = tfd.distribute(_build, strategy)
    x = np.ones([16, 2], "float32")
    assert model.fit(x, x[:, :1], batch_size=4, verbose=0).history["loss"][0] > 0


def _build() -> keras.Model:
    model = keras.Sequential([keras.Input([2]), keras.layers.Dense(2), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    return model


@pytest.mark.parametrize(("code", "fails"), [(0, False), ("no", True)])
def test_sys_exit_in_main_is_a_failure_unless_it_is_0(
    code: Any, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "last_value", None, raising=False)

    def main() -> None:
        raise SystemExit(code)

    with pytest.raises(SystemExit) as end:
        tfd.run(main)
    assert end.value.code == code
    assert (sys.last_value is end.value) == fails  # read at the exit of the process


def _missing(task: str) -> tfd.StrategyError:
    error = tfd.StrategyError(f"all tasks must be there, got no answer from {task}")
    error.missing = task
    return error


_WORKERS = {"worker": ["localhost:2222", "localhost:2223"]}


@pytest.mark.parametrize(
    "error",
    [
        tfd.PeerError("worker:1 is gone"),
        _missing("worker:1"),
        tf.errors.UnavailableError(None, None, "failed to connect"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_failure_because_of_another_task_asks_to_be_started_again(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def main() -> None:
        raise error

    monkeypatch.setattr(sys, "last_value", None, raising=False)
    with pytest.raises(type(error)):  # this process is alone: nobody else can be at fault
        tfd.run(main)
    task = {"cluster": _WORKERS, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(task))
    with pytest.raises(SystemExit) as end:
        tfd.run(main)
    assert end.value.code == RESTART
    assert sys.last_value is error
    printed = capsys.readouterr().err.splitlines()
    last = printed[-2 if isinstance(error, tfd.TfDistError) else -1]  # our errors end with a link
    assert re.fullmatch(rf"[\w.]*{type(error).__name__}: {error}", last)
