"""run_tasks: results, failures and hangs of real processes, and none that stays."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import task_bodies
from processes import check_dead

from tfdist_ext.errors import LaunchError
from tfdist_ext.testing import TaskError, run_tasks

TWO = {"worker": 2}


def wait_until_dead(folder: Path, files: int) -> None:
    pids = [int(file.read_text()) for file in folder.glob("*.pid")]
    assert len(pids) == files
    check_dead(pids)


def test_local_function_runs_in_tasks() -> None:
    shift = 4
    assert run_tasks(lambda x: x + shift, None, args=(3,)) == {"process": 7}


def test_each_run_has_new_processes() -> None:
    first = run_tasks(task_bodies.summed, TWO, 60)
    assert list(first) == ["worker:0", "worker:1"]
    assert [value for value, _ in first.values()] == [3.0, 3.0]
    second = run_tasks(task_bodies.summed, TWO, 60, args=(1.0,))
    assert [value for value, _ in second.values()] == [5.0, 5.0]
    assert len({pid for _, pid in [*first.values(), *second.values()]}) == 4


def test_failure_names_the_task_with_its_traceback(tmp_path: Path) -> None:
    start = time.monotonic()
    with pytest.raises(TaskError) as error:
        run_tasks(task_bodies.fails_on_one, TWO, 60, args=(str(tmp_path),))
    assert time.monotonic() - start < 30
    assert error.value.failed == ("worker:1",)
    text = str(error.value)
    assert text.startswith("worker:1 failed first, exit status 1:\nTraceback (most recent call ")
    assert "in fails_on_one" in text
    assert "ValueError: not today" in text
    assert text.count("about to fail") == 2
    assert text.count("ValueError: not today") == 1


def test_error_of_all_tasks_is_shown_once() -> None:
    with pytest.raises(TaskError) as error:
        run_tasks(task_bodies.fails, TWO, 60)
    assert str(error.value).count("ValueError: not today") == 1


def test_tasks_that_hang_at_their_exit_have_failed() -> None:
    with pytest.raises(TaskError, match="had returned but had not exited after 5 s") as error:
        run_tasks(task_bodies.hangs_at_exit, TWO, 5)
    assert error.value.failed == ("worker:0", "worker:1")


def test_timeout_shows_stacks_and_leaves_no_process(tmp_path: Path) -> None:
    with pytest.raises(TaskError) as error:
        run_tasks(task_bodies.hangs, TWO, 3, args=(str(tmp_path),))
    assert error.value.failed == ("worker:0", "worker:1")
    text = str(error.value)
    assert "worker:0, worker:1 had not ended after 3 s; their stacks are in their output" in text
    assert "in _initialize_multi_worker" in text
    assert text.count("in hangs") == 2
    wait_until_dead(tmp_path, 2)


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        ({"wrker": 2}, "types chief, worker, ps, evaluator, got 'wrker'"),
        ({"worker": 1, "chief": 2}, "chief must be an integer from 0 to 1, got 2"),
    ],
)
def test_tasks_of_no_cluster_are_refused(cluster: dict[str, int], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        run_tasks(print, cluster, 10)


BY_HAND = """
import sys
sys.path.insert(0, {here!r})
import task_bodies
from tfdist_ext.testing import run_tasks
from tfdist_ext.testing import warm
warm._PRELOADED = ()  # its tasks do not use TensorFlow
if __name__ == "__main__":
    run_tasks(task_bodies.with_a_child, 2, 100, args=({folder!r},))
"""


def test_no_process_is_left_when_the_caller_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "caller.py"
    script.write_text(BY_HAND.format(here=str(Path(__file__).parent), folder=str(tmp_path)))
    command = [sys.executable, str(script)]
    nowhere = subprocess.DEVNULL
    caller = subprocess.Popen(command, cwd=tmp_path, stdout=nowhere, stderr=nowhere)
    try:
        deadline = time.monotonic() + 60
        while len(list(tmp_path.glob("*.pid"))) < 4:
            assert caller.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        caller.send_signal(signal.SIGKILL)
        assert caller.wait(20) != 0
    finally:
        caller.kill()
    wait_until_dead(tmp_path, 4)
