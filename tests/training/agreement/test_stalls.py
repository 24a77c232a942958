"""A training that stands still ends by itself, and names the task and what it is at."""

from __future__ import annotations

import math
import os
import re
import sys
from pathlib import Path

import pytest
from real_tasks import PROGRAMS, tasks
from warm_programs import run_program

from tfdist_ext.launch.exit_codes import RESTART, STALL_TIMEOUT
from tfdist_ext.training.agreement.single_task import Phases


class TestPhases:
    def test_a_phase_may_take_five_times_the_longest_before(self) -> None:
        phases = Phases(60.0)
        phases.enter("steps")
        phases.tick(20.0)
        phases.enter("callbacks")
        assert phases.limit == 300.0
        phases.enter("steps")
        assert phases.limit == 100.0
        assert not any(phases.tick(1.0) for _ in range(99))
        assert phases.tick(1.0)
        assert str(phases).startswith("100 s in steps (the longest before took 20.0 s; more than")

    @pytest.mark.parametrize(
        ("text", "watched"),
        [("5", True), ("0", False), ("-1", False), ("inf", False), ("nan", False), ("?", True)],
    )
    def test_of_the_environment(
        self, monkeypatch: pytest.MonkeyPatch, text: str, watched: bool
    ) -> None:
        monkeypatch.setenv(STALL_TIMEOUT, text)
        assert (Phases.of_environment().timeout < math.inf) == watched


@pytest.mark.parametrize(
    ("where", "says"),
    [
        ("callback", r"worker:1 has stalled: \d+ s in callbacks \(the longest before took"),
        ("data", r"worker:1 has stalled reading its data: no step is done for \d+ s"),
    ],
)
def test_a_worker_that_stands_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, says: str
) -> None:
    monkeypatch.setenv(STALL_TIMEOUT, "3")
    with tasks(
        "standing_still.py", where, "worker:1", str(tmp_path),
        folder=tmp_path, workers=2, ps=0,
    ) as cluster:  # fmt: skip
        cluster.start("worker:0", "worker:1")
        assert cluster.status("worker:1", 90.0) == RESTART
        assert cluster.status("worker:0", 30.0) == 1
        assert re.search(f"PeerError: {says}", cluster.log("worker:0"))
        assert re.search(f"tfdist: {says}", cluster.log("worker:1"))
        for name in ("worker:0", "worker:1"):
            assert "(most recent call first):" in cluster.log(name)


def test_a_worker_of_a_parameter_server_job_that_stands_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(STALL_TIMEOUT, "3")
    with tasks(
        "standing_still.py", "data", "worker:1", str(tmp_path),
        folder=tmp_path, workers=2, ps=1,
    ) as cluster:  # fmt: skip
        cluster.start("chief:0", "worker:0", "worker:1", "ps:0")
        assert cluster.status("chief:0", 90.0) == RESTART
        for name in ("worker:0", "worker:1", "ps:0"):
            assert cluster.status(name, 30.0) == RESTART
            assert "(most recent call first):" in cluster.log(name)
        said = r"tfdist: chief:0 has stalled: \d+ s in steps .*; it waits for worker:1\."
        assert re.search(said, cluster.log("chief:0"))


def test_a_process_alone_whose_data_stops(tmp_path: Path) -> None:
    env = {**os.environ, STALL_TIMEOUT: "3"}
    command = [sys.executable, str(PROGRAMS / "standing_still.py"), "data", "", str(tmp_path)]
    run = run_program(command, tmp_path, env=env, timeout=100)
    assert run.returncode == RESTART, run.stderr[-3000:]
    assert "tfdist: this process has stalled: " in run.stderr
