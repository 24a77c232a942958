"""A training that stands still ends by itself, and names the task and what it is at."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from pathlib import Path

import pytest
from real_tasks import PROGRAMS, tasks
from warm_programs import run_program

from tfdist_ext.errors import PeerError, TrainingError
from tfdist_ext.launcher.exit_codes import RESTART, STALL_TIMEOUT
from tfdist_ext.training.agreement.task_status import TaskStatus


def fail_after_sigterm(error: type[Exception]) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    raise error("disk full")


class TestTaskStatus:
    def test_a_phase_may_take_five_times_the_longest_before(self) -> None:
        status = TaskStatus(60.0)
        status.enters("steps")
        status.tick(20.0)
        status.enters("callbacks")
        assert not status.tick(299.0)
        status.enters("steps")
        assert not any(status.tick(1.0) for _ in range(99))
        said = status.tick(1.0)
        assert said.startswith("100 s in steps (longest before: 20.0 s, limit: 100 s")

    def test_the_first_steps_count_although_they_are_compiled_meanwhile(self) -> None:
        """Such as 50 s in which a buffer of a shuffle is filled, in each epoch."""
        status = TaskStatus(60.0)
        status.enters("steps")
        status.enters("compiling")
        status.tick(50.0)
        status.enters("steps")
        assert not status.tick(249.0)
        assert "longest before: 50.0 s, limit: 250 s" in status.tick(1.0)

    def test_a_signal_ends_the_scope_with_143_and_the_handler_is_restored(self) -> None:
        status = TaskStatus()
        requested = []
        with pytest.raises(SystemExit) as ended, status.ends_at_a_step():
            requested += [os.kill(os.getpid(), signal.SIGTERM), status.stop_requested]
        assert requested[1]
        assert ended.value.code == 143
        # An error of this task says more than the signal; that of a task that ended first does not.
        for error, raised in (TrainingError, TrainingError), (PeerError, SystemExit):
            with pytest.raises(raised), status.ends_at_a_step():
                fail_after_sigterm(error)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        assert not status.stop_requested

    def test_an_own_handler_and_other_threads_are_left_alone(self) -> None:
        status, seen = TaskStatus(), []
        before = signal.signal(signal.SIGTERM, lambda *_: seen.append("own"))
        try:
            with status.ends_at_a_step():
                os.kill(os.getpid(), signal.SIGTERM)
        finally:
            signal.signal(signal.SIGTERM, before)

        def in_thread() -> None:
            with status.ends_at_a_step():
                seen.append(signal.getsignal(signal.SIGTERM))

        thread = threading.Thread(target=in_thread)
        thread.start()
        thread.join()
        assert seen == ["own", signal.SIG_DFL]


@pytest.mark.long("data")
@pytest.mark.parametrize(
    ("where", "says"),
    [
        ("callback", r"worker:1 has stalled: \d+ s in callbacks \(longest before: "),
        ("data", r"worker:1 has stalled reading its data: \d+ s in steps"),
    ],
)
def test_stalled_worker_is_named(
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


def test_stalled_worker_of_parameter_servers_is_named(
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
        said = r"tfdist: chief:0 has stalled: \d+ s in steps .*; waiting for worker:1\."
        assert re.search(said, cluster.log("chief:0"))


def test_stalled_data_ends_a_single_process(tmp_path: Path) -> None:
    env = {**os.environ, STALL_TIMEOUT: "3"}
    command = [sys.executable, str(PROGRAMS / "standing_still.py"), "data", "", str(tmp_path)]
    run = run_program(command, tmp_path, env=env, timeout=100)
    assert run.returncode == RESTART, run.stderr[-3000:]
    assert "tfdist: this process has stalled: " in run.stderr
