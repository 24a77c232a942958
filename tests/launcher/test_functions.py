"""`tfd.launch` from scripts: results, failures, signals, what is left."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tfdist_ext import launch
from tfdist_ext.errors import LaunchError

pytestmark = pytest.mark.timeout(60)

BEGIN = "import os, signal, sys, time\nimport tfdist_ext as tfd\n"
ME = "me = tfd.ClusterConfig.from_env().task"


@pytest.fixture
def start(mark, tmp_path) -> Callable[..., subprocess.Popen[str]]:
    """Start a script that launches functions of its own."""

    def started(code: str) -> subprocess.Popen[str]:
        script = tmp_path / "script.py"
        script.write_text(BEGIN + textwrap.dedent(code), encoding="utf-8")
        # Without PYTHONPATH the tasks find the package by the path of the process alone.
        return subprocess.Popen(
            [sys.executable, str(script)],
            cwd=tmp_path,
            env={**mark.env, "TMPDIR": str(tmp_path)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return started


@pytest.fixture
def run(start, mark) -> Callable[[str], tuple[int, str, str]]:
    """Its exit status, what it has printed, and its errors; nothing is left of it."""

    def ran(code: str) -> tuple[int, str, str]:
        with start(code) as popen:
            out, err = popen.communicate(timeout=40)
        assert mark.pids() == []
        assert not [each for each in Path(popen.args[-1]).parent.glob("tfdist-*")]
        return popen.returncode, out, err

    return ran


def test_results_are_in_the_order_of_tasks(run):
    status, out, err = run(f"""
        class Point:  # of no module that the tasks could import
            def __init__(self, x):
                self.x = x

        scale = 10
        def place(shift):
            {ME}
            time.sleep(0.1 * (me.index == 0))
            return Point(scale * me.index + shift), str(me)

        found = tfd.launch(place, args=(3,), workers=2, chief=True)
        assert all(type(point) is Point for point, _ in found.values())
        print([point.x for point, _ in found.values()])
        assert list(found) == [name for _, name in found.values()]
        print(*found)
    """)
    assert (status, err) == (0, "")
    assert out == "[3, 3, 13]\nchief:0 worker:0 worker:1\n"


def test_tasks_import_modules_of_the_callers_path(run, tmp_path):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "mine.py").write_text("def answer():\n    return 42\n")
    status, out, _ = run("""
        sys.path.append("lib")
        import mine
        print(tfd.launch(mine.answer, workers=1), tfd.launch(lambda: mine.answer(), workers=1))
    """)
    assert (status, out) == (0, "{'worker:0': 42} {'worker:0': 42}\n")


def test_exception_raises_task_error_with_its_traceback(run):
    status, out, _ = run(f"""
        def fails():
            {ME}
            if me.index == 1:
                raise OSError("no such file: data.tfrecord")
            time.sleep(60)

        try:
            tfd.launch(fails, log_dir="logs")
        except tfd.TaskError as error:
            assert error.failed == ("worker:1",)
            print(error)
        print(open("logs/worker-1.log").read())
    """)
    assert status == 0
    text = out.partition("worker:1 failed first")[2]
    assert text.startswith(", exit status 1:\nTraceback (most recent call last):\n")
    assert text.count('    raise OSError("no such file: data.tfrecord")\n') == 2  # and in the log
    assert "function_task.py" not in out


def test_exit_kill_and_unpicklable_result_raise_task_error(run):
    status, out, _ = run("""
        def exits():
            sys.exit("no data")

        def is_killed():
            print("x")
            os.kill(os.getpid(), 9)

        def cannot_be_sent():
            return (each for each in ())

        for ends in (exits, is_killed, cannot_be_sent):
            try:
                tfd.launch(ends, workers=1)
            except tfd.TaskError as error:
                print(error)
    """)
    assert status == 0
    assert "worker:0 failed first, exit status 1:\nno data\n" in out
    assert "worker:0 failed first, exit status 137:\nx\n" in out
    assert "the result of fn, a generator, cannot be copied to the process that called it" in out


def test_no_task_waits_for_a_process_that_has_ended(run):
    """Its end by `os._exit` writes nothing, and the launcher keeps it as a zombie."""
    status, out, err = run(f"""
        def leaves():
            {ME}
            if me.index == 0:
                os._exit(0)
            return str(me)

        print(tfd.launch(leaves))
    """)
    assert (status, out, err) == (0, "{'worker:1': 'worker:1'}\n", "")


def test_launch_restarts_and_returns_the_last_results(run):
    """The results are those of the last start."""
    status, out, err = run(f"""
        def once():
            {ME}
            start = os.environ["TFDIST_RESTARTS"]
            if me.index == 1 and start == "0":
                time.sleep(0.5)  # the other has returned
                os.kill(os.getpid(), 9)
            return start
        print(tfd.launch(once, max_restarts=2))
    """)
    assert (status, out) == (0, "{'worker:0': '1', 'worker:1': '1'}\n")
    assert "worker:1 failed first" in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_the_tasks_and_the_caller(start, mark, number):
    with start("""
        def sleep():
            print("sleeps")
            time.sleep(60)
        try:
            tfd.launch(sleep)
        except KeyboardInterrupt:
            print("interrupted")
    """) as popen:
        for _ in range(2):
            assert "sleeps" in popen.stdout.readline()
        popen.send_signal(number)
        began = time.monotonic()
        out, err = popen.communicate(timeout=20)
    assert time.monotonic() - began < 5
    ends_it = number == signal.SIGTERM
    assert (popen.returncode, out) == ((-number, "") if ends_it else (0, "interrupted\n"))
    assert f"tfdist: {number.name}: ending 2 tasks" in err
    assert mark.pids() == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"workers": 0}, "leaves no task that trains"),
        ({"fn": 3}, "fn must be a function, got 3"),
        ({"args": (lambda: 0, (each for each in ()))}, "cannot pickle 'generator' object"),
    ],
)
def test_invalid_launch_is_refused(arguments, message):
    with pytest.raises(LaunchError, match=message):
        launch(**{"fn": print, **arguments})
