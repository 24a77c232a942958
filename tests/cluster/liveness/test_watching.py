"""Whether a task has died or is frozen, told from what answers at its address."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from tfdist_ext.cluster.liveness import WaitReports
from tfdist_ext.cluster.liveness.watching import (
    ALIVE,
    DONE,
    EXPECTED,
    FROZEN,
    GONE,
    Servers,
    TaskWatch,
    Watcher,
)
from tfdist_ext.cluster.liveness.wire import STARTED, Connection, Endpoint
from tfdist_ext.failures import ERROR_FILE, failure_in
from tfdist_ext.launcher.resources import reserve_ports


def states(task: TaskWatch, number: int) -> list[str]:
    found = []
    for _ in range(number):
        task.look()
        found.append(task.state)
    return found


def silent_listener(port: int) -> socket.socket:
    """As a frozen process: the kernel accepts connections, and nobody answers."""
    return socket.create_server(("127.0.0.1", port))


def test_tensorflow_server_counts_as_started() -> None:
    with reserve_ports(1) as (port,):
        address = f"127.0.0.1:{port}"
        server = tf.distribute.Server({"ps": [address]}, job_name="ps", task_index=0)
        assert Connection(address).ask({}, 10.0) == (STARTED, {})
        del server


def test_task_watch_follows_the_states_of_a_task() -> None:
    with reserve_ports(1) as (port,):
        address = f"127.0.0.1:{port}"
        task = TaskWatch("chief:0", address, frozen_after=1.0)
        assert states(task, 5) == [EXPECTED] * 5  # it has not come yet
        endpoint = Endpoint(address, dict)
        assert states(task, 1) == [ALIVE]
        endpoint.close()
        assert states(task, 4) == [ALIVE, ALIVE, ALIVE, GONE]
        with silent_listener(port):
            assert states(task, 5) == [GONE] * 4 + [FROZEN]
            assert task.failure == (
                f"chief:0 ({address}) has not answered for 1 s: its process is stopped, or its"
                " machine is paused, overloaded or cannot be reached"
            )
            never_seen = TaskWatch("chief:0", address, frozen_after=0.2)
            assert states(never_seen, 7) == [EXPECTED] * 7


def test_wait_reports_become_rarer() -> None:
    waits = WaitReports()
    times = (9, 10, 19, 20, 39, 40, 200, 319, 320)
    assert [waited for waited in times if waits.due(waited)] == [10, 20, 40, 200, 320]


@pytest.mark.parametrize("has_started", [True, False])
def test_watcher_ends_its_process_and_reports_why(tmp_path: Path, has_started: bool) -> None:
    error_file = tmp_path / "error"
    with reserve_ports(1) as (port,):
        address = f"127.0.0.1:{port}"
        asked = threading.Event()
        endpoint = Endpoint(address, lambda _: asked.set() or {}) if has_started else None
        seconds = 1.0 if has_started else 4.0
        program = (
            "import time\nfrom tfdist_ext.cluster.liveness.watching import Watcher\n"
            f"watcher = Watcher('chief:0', {{'ps:1': '{address}'}}, {seconds})\n"
            "time.sleep(60)"
        )
        process = subprocess.Popen(
            [sys.executable, "-c", program],
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {ERROR_FILE: str(error_file)},
        )
        try:
            if endpoint is None:
                _, errors = process.communicate(timeout=60)
            else:
                assert asked.wait(60)
                endpoint.close()  # it was there, and never answers again
                with silent_listener(port):
                    _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == -signal.SIGTERM
    frozen = (
        "has not answered for 1 s: its process is stopped, or its"
        " machine is paused, overloaded or cannot be reached"
    )
    gone = (
        "is gone: nothing listens there (it ended, crashed or was killed, or its machine is down:"
        " see its log)"
    )
    why = frozen if has_started else gone
    assert errors.splitlines()[-1] == f"chief:0: ps:1 ({address}) {why}. The job ends."
    failure = failure_in(error_file)
    assert failure is not None
    assert (failure.peer, f"chief:0: {failure.message}. The job ends.") == ("ps:1", errors.strip())


def test_watcher_runs_although_a_path_is_in_sys_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, Path("somewhere")])
    with reserve_ports(1) as (port,):
        address = f"127.0.0.1:{port}"
        asked = threading.Event()
        endpoint = Endpoint(address, lambda _: asked.set() or {})
        watcher = Watcher("chief:0", {"ps:1": address}, 1.0)
        assert asked.wait(60)
        del watcher
        endpoint.close()


@pytest.mark.filterwarnings("error")
def test_watcher_ends_with_its_object(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def start(*args: Any, **kwargs: Any) -> subprocess.Popen[bytes]:
        started.append(popen(*args, **kwargs))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    watcher = Watcher("chief:0", {"ps:1": "127.0.0.1:1"}, 1.0)
    (process,) = started
    assert process.poll() is None
    del watcher
    gc.collect()
    assert process.returncode == -signal.SIGKILL


def test_session_outlives_the_port_and_reopens() -> None:
    with reserve_ports(1) as (port,):
        address = f"127.0.0.1:{port}"
        first = Endpoint(address, dict)
        servers = Servers("chief:0", {"ps:0": address})
        first.free_port(session_within=5.0)
        assert first.had_session
        second = Endpoint(address, dict)  # the port is free; as after a restart of the task
        assert first.next_message(0.1) == {}
        first.close()
        second.free_port(session_within=10.0)
        silent = servers.end(DONE)
        assert (silent, second.next_message(1.0)["result"]) == ([], DONE)
        second.close()
