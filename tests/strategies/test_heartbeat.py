"""Whether a task is frozen, told from what its gRPC server answers."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from tfdist_ext.launch import reserve_ports
from tfdist_ext.strategies import heartbeat
from tfdist_ext.strategies.heartbeat import Silence, greets


def test_a_server_of_tensorflow_greets() -> None:
    with reserve_ports(1) as (port,):
        address = f"127.0.0.1:{port}"
        assert greets(address, 1.0) is None  # not started
        server = tf.distribute.Server({"ps": [address]}, job_name="ps", task_index=0)
        assert greets(address, 10.0) is True
        del server


def test_who_accepts_and_says_nothing_is_silent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        assert greets(address, 0.1) is False
    assert greets(address, 0.1) is None
    assert greets("no such host:x", 0.1) is None


@pytest.mark.parametrize(
    ("answers", "frozen_at"),
    [
        ([False] * 20, None),  # never seen: it has not come yet
        ([True, *[False] * 9], 10),
        ([True, *[False] * 8, True, *[False] * 9], 19),  # anew from each answer
        ([True, *[False] * 8, None, *[False] * 8], None),  # it was started again
        ([True, None, None, None], None),  # it has ended, which TensorFlow sees
    ],
)
def test_so_many_beats_in_a_row_must_be_missed(
    answers: list[bool | None], frozen_at: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = iter(answers)
    monkeypatch.setattr(heartbeat, "greets", lambda address, timeout: next(left))
    silence = Silence("a:1", 45.0)
    assert silence.beat_every == 5.0
    beats = [silence.beat() for _ in answers]
    assert (beats.index(True) + 1 if True in beats else None) == frozen_at


def test_the_watcher_ends_its_process_and_says_why(tmp_path: Path) -> None:
    (tmp_path / "epoch-00003.safetensors").touch()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        program = (
            f"import sys, time; sys.path.insert(0, {str(Path(heartbeat.__file__).parent)!r})\n"
            "from heartbeat import Watcher\n"  # alone: it needs no TensorFlow
            f"watcher = Watcher('chief:0', {{'ps:1': '{address}'}}, 1.0)\n"
            f"watcher.checkpoints_in('{tmp_path}')\n"
            "time.sleep(60)"
        )
        process = subprocess.Popen(
            [sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, env=os.environ
        )
        try:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"x")  # it is there, and never answers again
            _, said = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == -signal.SIGTERM
    assert said.splitlines()[-1] == (
        f"chief:0: ps:1 ({address}) has not answered for 1 s: its process is stopped, or its"
        f" machine is paused or overloaded. The job ends. The last checkpoint is"
        f" {tmp_path}/epoch-00003.safetensors: start the job again to resume from it."
    )


@pytest.mark.filterwarnings("error")
def test_the_watcher_ends_with_its_object(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def start(*args: Any, **kwargs: Any) -> subprocess.Popen[bytes]:
        started.append(popen(*args, **kwargs))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    watcher = heartbeat.Watcher("chief:0", {"ps:1": "127.0.0.1:1"}, 1.0)
    (process,) = started
    assert process.poll() is None
    del watcher
    gc.collect()
    assert process.returncode == -signal.SIGKILL
