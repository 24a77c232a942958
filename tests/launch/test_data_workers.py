"""Tasks that serve all others (a tf.data service): ended quietly at the end, and never before."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(90)

SLEEP = "sleep 60"


# With shells


def test_services_are_ended_quietly_when_all_others_have_ended(run_tasks):
    ran = run_tasks(
        {"worker:0": "exit 0", "worker:1": "sleep 0.3", "service:0": SLEEP}, services=["service:0"]
    )
    assert (ran.result.exit_status, ran.result.failed_task, ran.err) == (0, None, "")
    assert ran.result.returncodes["service:0"] == -signal.SIGTERM
    assert 0.3 <= ran.seconds < 3


def test_they_are_not_waited_for_when_a_coordinator_has_succeeded(run_tasks):
    scripts = {"chief:0": "exit 0", "ps:0": "sleep 0.3", "service:0": SLEEP}
    ran = run_tasks(scripts, coordinator="chief:0", services=["service:0"], linger=30)
    assert (ran.result.exit_status, ran.err) == (0, "")
    assert ran.result.returncodes["ps:0"] == 0, "it had its time"
    assert ran.seconds < 3


def test_a_service_that_does_not_heed_sigterm_is_killed(run_tasks):
    stubborn = "trap '' TERM; while :; do sleep 0.05; done"
    scripts = {"worker:0": "sleep 0.2", "service:0": stubborn}
    ran = run_tasks(scripts, services=["service:0"], grace=0.2)
    assert (ran.result.exit_status, ran.err) == (0, "")
    assert ran.result.returncodes["service:0"] == -signal.SIGKILL


@pytest.mark.parametrize(("code", "status"), [(3, 3), (0, 1)])
def test_a_service_that_ends_before_is_a_failure(run_tasks, code, status):
    scripts = {"worker:0": SLEEP, "service:0": f"sleep 0.1; exit {code}", "service:1": SLEEP}
    ran = run_tasks(scripts, services=["service:0", "service:1"])
    assert (ran.result.exit_status, ran.result.failed_task) == (status, "service:0")
    assert re.search(rf"service:0 failed first, after [\d.]+ s: exit code {code}", ran.err)
    assert ran.seconds < 3


def test_a_task_that_fails_ends_the_services(run_tasks):
    ran = run_tasks({"worker:0": "exit 4", "service:0": SLEEP}, services=["service:0"])
    assert (ran.result.exit_status, ran.result.failed_task) == (4, "worker:0")
    assert "then the others ended: service:0 killed by SIGTERM" in ran.err


def test_no_service_is_blamed_when_time_is_up(run_tasks):
    scripts = {"worker:0": SLEEP, "service:0": SLEEP}
    ran = run_tasks(scripts, services=["service:0"], timeout=0.2)
    assert ran.result.exit_status == 124
    assert "    worker:0: (wrote nothing)" in ran.err
    assert "service:0" not in ran.err


# With TensorFlow


def test_a_data_worker_that_is_killed_ends_the_run(tfdist, mark):
    launcher = tfdist("run", "--data-workers", "1", "--", "sh", "-c", SLEEP, PYTHONWARNINGS="")
    for line in launcher.stdout:
        if "worker: ready at" in line:
            break
    (worker,) = [pid for pid in mark.pids() if b"\0--dispatcher\0" in command_of(pid)]
    os.kill(worker, signal.SIGKILL)
    killed = time.monotonic()
    _, err = launcher.communicate(timeout=20)
    assert time.monotonic() - killed < 6
    assert launcher.returncode == 128 + signal.SIGKILL
    assert mark.pids() == []
    assert "tfdist: data_worker:0 failed; ending the others" in err
    assert "killed by SIGKILL (signal 9)" in err
    assert "    worker: ready at 127.0.0.1:" in err


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
