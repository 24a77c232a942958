"""Trainings in the workers of a real Ray Train run on this machine."""

from __future__ import annotations

import filecmp
import importlib.util
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ROOT, Process, Result, Starter, assert_equal, result_in, training

WHY_NOT = (
    ""
    if importlib.util.find_spec("ray")
    else "Ray is not installed (pip install -e '.[environments]')"
)
pytestmark = [
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "-"),
    pytest.mark.timeout(240),
]
EPOCHS, STEPS = 3, 30
ENV = {
    "RAY_DEDUP_LOGS": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "PYTHONPATH": str(ROOT / "docs" / "examples"),
}


def is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def processes_of(session: str) -> list[str]:
    """The commands of Ray's own processes of a session."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = Path("/proc", name, "cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
        if session in words:
            found.append(words)
    return found


def wait_for_end(driver: Process) -> str:
    assert driver.ended(200) == 0, driver.output[-6000:]
    return driver.output


def test_a_worker_that_is_killed(
    start: Starter, tmp_path: Path, undisturbed: Callable[[int, int], Result]
) -> None:
    """Ray starts the workers again, and they go on to the weights of a training on one device."""
    expected = undisturbed(EPOCHS, STEPS)
    command = [*training(tmp_path, EPOCHS, STEPS)[1:], "ray"]
    program = str(ROOT / "tests" / "programs" / "ray_training.py")
    driver = start(sys.executable, program, str(tmp_path), *command, **ENV)
    driver.wait_for("STEP 40", 120)
    victim = int((tmp_path / "pid-1").read_text())
    os.kill(victim, signal.SIGKILL)
    log = wait_for_end(driver)

    assert_equal(result_in(tmp_path), expected)
    assert "[Rank 1 Error Snippet]" in log  # the one that was killed
    assert "resuming from epoch 2, step 30" in log
    known = json.loads((tmp_path / "result.json").read_text())
    for name in ("loss", "val_loss"):
        reported = [metrics[name] for metrics in known["reported"]]
        assert reported == pytest.approx(expected[name], abs=1e-6)
    assert [metrics["epoch"] for metrics in known["reported"]] == list(range(EPOCHS))
    latest = Path(known["checkpoint"]) / "checkpoint.h5"
    assert filecmp.cmp(latest, tmp_path / "checkpoints" / f"epoch-{EPOCHS:05d}.h5", shallow=False)

    assert not processes_of((tmp_path / "session").read_text())
    pids = [victim, *(int((tmp_path / f"pid-{rank}").read_text()) for rank in (0, 1))]
    assert not [pid for pid in pids if is_there(pid)]
