"""`tfdist run --max-restarts`: which failures are followed by a start, and by which workers."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tfdist_ext.errors import LaunchError
from tfdist_ext.launcher.exit_codes import FAILED, PREEMPTED, RESTART
from tfdist_ext.launcher.restarts import Attempt, RestartPolicy, next_attempt

pytestmark = pytest.mark.timeout(40)

KILLED = 128 + 9
THREE = (0, 1, 2)


def policy(max_restarts: int = 3, min_workers: int = 3) -> RestartPolicy:
    return RestartPolicy(max_restarts, 3, min_workers)


def end(status: int, failed: int | None = None, workers: tuple[int, ...] = THREE, **more: object):
    return Attempt(status, workers, seconds=60.0, failed=failed, **more)


@pytest.mark.parametrize(
    ("past", "workers", "why"),
    [
        ([end(KILLED, 1)], THREE, "restart 1 of 3"),
        ([end(RESTART, 1), end(KILLED, 2)], THREE, "restart 2 of 3"),
        ([end(3, 1)], None, "exit code 3 is a permanent failure: not started again"),
        ([end(FAILED, 1)], None, "exit code 1 is a permanent failure: not started again"),
        ([end(FAILED, 1, raised="OSError")], THREE, "restart 1 of 3"),
        (
            [
                end(FAILED, 1, raised="OSError"),
                end(KILLED, 2),
                end(FAILED, 0, raised="OSError"),
            ],
            None,
            "the same exception as before: not started again",
        ),
        (
            [end(FAILED, 1, raised="OSError"), end(FAILED, 1, raised="KeyError")],
            THREE,
            "restart 2 of 3",
        ),
        (  # days later it is another failure
            [end(FAILED, 1, raised="OSError"), Attempt(FAILED, THREE, 2e5, 1, "OSError")],
            THREE,
            "restart 2 of 3",
        ),
        ([end(KILLED, 1)] * 4, None, "all 3 restarts (--max-restarts) are used up"),
        ([end(PREEMPTED, 1)] * 9, THREE, "preempted; this does not count as a restart"),
    ],
)
def test_next_attempt_follows_the_policy(
    past: list[Attempt], workers: tuple[int, ...] | None, why: str
) -> None:
    assert next_attempt(policy(), past) == (workers, why)


def test_immediate_preemptions_count_as_restarts() -> None:
    at_once = Attempt(PREEMPTED, THREE, seconds=1.0)
    assert next_attempt(policy(2), [at_once] * 2)[0] == THREE
    assert next_attempt(policy(2), [at_once] * 3)[0] is None


def test_worker_that_fails_twice_in_a_row_is_left_out() -> None:
    rules = policy(5, min_workers=2)
    past = [end(KILLED, 1), end(KILLED, 1)]
    left_out = "worker 1 has failed 2 times in a row and is left out"
    why = f"restart 2 of 5; {left_out}: 2 workers, numbered from 0"
    assert next_attempt(rules, past) == ((0, 2), why)
    # No fewer than asked for.
    past.append(end(KILLED, 2, (0, 2)))
    past.append(end(KILLED, 2, (0, 2)))
    assert next_attempt(rules, past)[0] == (0, 2)


def test_alternating_failures_leave_out_no_worker() -> None:
    past = [end(KILLED, 1), end(KILLED, 2), end(KILLED, 1)]
    assert next_attempt(policy(min_workers=1), past)[0] == THREE


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ((-1, 3, 3), "--max-restarts must be an integer of at least 0, got -1"),
        ((3, 3, 4), "--min-workers must be an integer from 1 to 3, got 4"),
        ((0, 3, 2), "--min-workers 2 needs --max-restarts"),
    ],
)
def test_contradictory_numbers_are_refused(numbers: tuple[int, int, int], said: str) -> None:
    with pytest.raises(LaunchError, match=said):
        RestartPolicy(*numbers)


# What each task runs: $n is how many starts were before, $me its index, $all the workers.
HEAD = """
n=$TFDIST_RESTARTS
me=$(echo "$TF_CONFIG" | sed 's/.*"index": \\([0-9]*\\).*/\\1/')
job=$(echo "$TF_CONFIG" | sed 's/.*"type": "\\([a-z]*\\)".*/\\1/')
all=$(echo "$TF_CONFIG" | sed 's/.*"worker": \\[\\([^]]*\\)\\].*/\\1/' | tr ',' '\\n' | wc -l)
"""


_OF_RESTARTS = re.compile(
    r"tfdist: (restart \d|preempted;|all \d+ restarts|exit code \d+ is|the same exc"
    r"|worker:\d failed \()"
)


def run(tfdist: Any, script: str, *options: str) -> tuple[int, str, str]:
    launcher = tfdist("run", *options, "--", "sh", "-c", HEAD + script)
    out, err = launcher.communicate(timeout=30)
    return launcher.returncode, out, err


def said(err: str) -> list[str]:
    """What the launcher says of restarts."""
    return [line for line in err.splitlines() if _OF_RESTARTS.match(line)]


def test_job_restarts_on_other_ports_until_it_succeeds(tfdist, tmp_path: Path) -> None:
    script = """
    echo $n $TF_CONFIG; sleep 0.5
    [ "$TFDIST_STARTS_AGAIN" = 1 ] || exit 3
    [ $n = 2 ] && exit 0
    [ $me = 1 ] && kill -9 $$
    sleep 20"""
    options = ("--workers", "2", "--max-restarts", "2", "--log-dir", str(tmp_path))
    begun = time.monotonic()
    status, out, err = run(tfdist, script, *options)
    assert status == 0
    assert time.monotonic() - begun < 10  # nobody was waited for
    assert said(err) == ["tfdist: restart 1 of 2", "tfdist: restart 2 of 2"]
    ports = [set(re.findall(rf"^\[worker:0\] {n} .*?:(\d{{5}})\"", out, re.M)) for n in range(3)]
    assert all(ports)
    assert not ports[0] & ports[1]
    assert "2 {" in (tmp_path / "restart-2" / "worker-1.log").read_text()


def test_timeout_covers_all_starts(tfdist) -> None:
    script = "[ $n = 0 ] && { sleep 1; exit 138; }; sleep 60"
    begun = time.monotonic()
    status, _, err = run(tfdist, script, "--max-restarts", "1", "--timeout", "2.5")
    assert status == 124
    assert 2.5 <= time.monotonic() - begun < 6
    assert "not finished after 2.5 s (--timeout)" in err


def test_repeated_exception_ends_the_job(tfdist) -> None:
    script = """python3 -c '
import tfdist_ext
def step():
    raise ValueError("the same one")
step()'; echo 'and so on'; exit 1"""
    status, out, err = run(tfdist, script, "--max-restarts", "5")
    assert status == 1
    assert out.count("Traceback") == 2
    assert said(err) == [
        "tfdist: restart 1 of 5",
        "tfdist: the same exception as before: not started again",
    ]


def test_job_continues_without_a_worker_that_always_fails(tfdist) -> None:
    script = """
    echo start $n of $all
    [ $n -lt 2 ] && [ $me = 1 ] && kill -9 $$
    [ $n = 2 ] && exit 0
    trap 'exit 143' TERM
    while :; do sleep 0.05; done"""
    options = ("--workers", "3", "--min-workers", "2", "--max-restarts", "3")
    status, out, err = run(tfdist, script, *options)
    assert status == 0
    workers = [set(re.findall(rf"start {n} of (\d)", out)) for n in range(3)]
    assert workers == [{"3"}, {"3"}, {"2"}]
    assert said(err) == [
        "tfdist: restart 1 of 3",
        "tfdist: restart 2 of 3; worker 1 has failed 2 times in a row and is left out:"
        " 2 workers, numbered from 0",
    ]


def test_signal_to_the_launcher_does_not_restart(tfdist) -> None:
    script = "trap 'echo saved; exit 143' TERM; echo ready; while :; do sleep 0.05; done"
    options = ("--max-restarts", "3", "--preemption-signal", "SIGUSR1")
    launcher = tfdist("run", *options, "--", "sh", "-c", script)
    assert "ready" in launcher.stdout.readline()
    launcher.send_signal(signal.SIGUSR1)
    out, err = launcher.communicate(timeout=10)
    assert launcher.returncode == 143
    assert "saved" in out
    assert "SIGUSR1: ending 1 tasks within 30 s" in err
    assert said(err) == []


def test_preempted_task_restarts_all_tasks(tfdist) -> None:
    script = """
    [ $n = 1 ] && exit 0
    trap 'sleep 1.5; echo saved; exit 143' TERM
    [ $me = 0 ] && { sleep 0.5; kill -TERM $$; sleep 5; }
    while :; do sleep 0.05; done"""
    status, out, err = run(tfdist, script, "--workers", "2", "--max-restarts", "1")
    assert status == 0
    assert out.count("saved") == 2
    # On a busy machine, it takes longer than the ten seconds in which a preemption counts.
    assert re.match("tfdist: (restart 1 of 1|preempted;)", said(err)[0])


def test_worker_of_parameter_servers_restarts_alone(tfdist) -> None:
    """The chief does not notice. If the worker fails again, the run restarts without it."""
    script = """
    echo $job $me started
    case $job in
    chief) sleep 2;;
    ps) trap 'exit 0' TERM; while :; do sleep 0.05; done;;
    worker) [ $me = 1 ] && { sleep 0.3; kill -9 $$; }; while :; do sleep 0.05; done;;
    esac"""
    options = ("--workers", "2", "--ps", "1", "--min-workers", "1", "--max-restarts", "5",
               "--linger", "0")  # fmt: skip
    status, out, err = run(tfdist, script, *options)
    assert status == 0
    assert out.count("chief 0 started") == out.count("worker 0 started") == 2
    assert out.count("worker 1 started") == 2
    assert said(err) == [
        "tfdist: worker:1 failed (exit status 137); the other workers do its work; restart 1 of 5",
        "tfdist: restart 2 of 5; worker 1 has failed 2 times in a row and is left out:"
        " 1 worker, numbered from 0",
    ]
