"""Functions that tests run in tasks, and what they ask of processes."""

from __future__ import annotations

import atexit
import json
import os
import time
from pathlib import Path
from typing import Any


def index() -> int:
    return json.loads(os.environ["TF_CONFIG"])["task"]["index"]


def summed(offset: float = 0.0) -> tuple[float, int]:
    """The sum of the workers' numbers, and this process."""
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    print("worker", index(), "has", strategy.num_replicas_in_sync, "replicas")

    def add() -> Any:
        number = tf.constant(float(index() + 1) + offset)
        return tf.distribute.get_replica_context().all_reduce("SUM", number)

    return float(strategy.run(add)), os.getpid()


def fails_on_one(folder: str) -> None:
    print("about to fail")
    Path(folder, f"{index()}.printed").touch()
    if index() == 1:
        while not Path(folder, "0.printed").exists():
            time.sleep(0.01)
        raise ValueError("not today")
    summed()  # waits for the other for ever


def fails() -> None:
    raise ValueError("not today")


def hangs(folder: str) -> None:
    Path(folder, f"{index()}.pid").write_text(str(os.getpid()))
    if index() == 0:
        summed()
    time.sleep(600)


def hangs_at_exit() -> None:
    atexit.register(time.sleep, 600)


def with_a_child(folder: str) -> None:
    """Starts a process of its own that would go on."""
    import subprocess

    child = subprocess.Popen(["sleep", "600"])
    Path(folder, f"child-{index()}.pid").write_text(str(child.pid))
    Path(folder, f"{index()}.pid").write_text(str(os.getpid()))
    time.sleep(600)
