"""A frozen task (SIGSTOP) is named, and ends the job, whatever the others are doing."""

from __future__ import annotations

import json
import signal
import time
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from real_tasks import Tasks, tasks

from tfdist_ext.launcher.exit_codes import RESTART

pytestmark = pytest.mark.timeout(150)
NAMES = ["chief:0", "worker:0", "worker:1", "ps:0"]
WITHIN = 45.0  # seconds; of them 4 without an answer (6 for the chief), and 10 to end


def frozen_task(folder: Path, doing: str) -> AbstractContextManager[Tasks]:
    words = ("frozen_task.py", doing, str(folder / "checkpoints"))
    return tasks(*words, folder=folder, workers=2, ps=1)


def freeze(cluster: Tasks, victim: str) -> dict[str, int]:
    """The statuses of the others."""
    cluster.start(*NAMES)
    cluster.wait_for("chief:0", "READY", 100)
    time.sleep(0.3)
    cluster.signal(victim, signal.SIGSTOP)
    return {name: cluster.status(name, WITHIN) for name in NAMES if name != victim}


def test_the_chief_names_a_frozen_server_and_ends(tmp_path: Path) -> None:
    with frozen_task(tmp_path, "fit") as cluster:
        statuses = freeze(cluster, "worker:1")
        said = cluster.log("chief:0")
    assert statuses.pop("chief:0") in (-signal.SIGTERM, -signal.SIGKILL), said[-3000:]
    assert set(statuses.values()) == {RESTART}
    assert "chief:0: worker:1 (127.0.0.1:" in said
    assert "has not answered for 4 s: its process is stopped" in said


def test_the_servers_name_a_frozen_chief_and_end(tmp_path: Path) -> None:
    with frozen_task(tmp_path, "fit") as cluster:
        statuses = freeze(cluster, "chief:0")
        said = [cluster.log(name) for name in statuses]
    assert set(statuses.values()) == {RESTART}
    for line in said:
        assert "chief:0 (127.0.0.1:" in line
        assert "has not answered for 6 s" in line


@pytest.mark.long
def test_busy_tasks_are_not_frozen(tmp_path: Path) -> None:
    """A step that takes longer than a frozen task has, on more threads than there are cores."""
    with frozen_task(tmp_path, "slow") as cluster:
        cluster.start(*NAMES)
        cluster.wait_for("chief:0", "READY", 100)
        started = time.monotonic()
        turns = json.loads(cluster.wait_for("chief:0", "RESULT (.*)", 120)[1])
        assert min(turns) > 2
        assert time.monotonic() - started > 6.0
        assert cluster.status("chief:0") == 0
        assert "has not answered" not in cluster.log("chief:0")
