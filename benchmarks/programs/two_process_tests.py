"""Tests that sum over two processes, with and without the plugin. See second_test.py."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tfdist_ext.launcher.plan import local_plan

TESTS = int(os.environ.get("TESTS", "5"))  # fewer without the plugin: each takes seconds
MEASURED = Path(os.environ.get("MEASURED", os.devnull))


def body() -> None:
    """What each test is about, in both processes: a sum over them."""
    import tensorflow as tf

    began = time.monotonic()
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    values = strategy.run(lambda: tf.constant(1.5))
    assert float(strategy.reduce("sum", values, None)) == 3.0
    with MEASURED.open("a") as file:
        file.write(f"{time.monotonic() - began}\n")


@pytest.mark.parametrize("number", range(TESTS))
@pytest.mark.tfdist_cluster(worker=2)
def test_with_the_plugin(number: int) -> None:
    body()


@pytest.mark.parametrize("number", range(TESTS))
def test_by_hand(number: int) -> None:
    command = [sys.executable, __file__]
    with local_plan(command, workers=2, env=os.environ) as plan:
        tasks = [subprocess.Popen(t.argv, env={**os.environ, **t.env}) for t in plan.tasks]
        try:
            assert [task.wait(60) for task in tasks] == [0, 0]
        finally:
            for task in tasks:
                task.kill()


if __name__ == "__main__":
    body()
