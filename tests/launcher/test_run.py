"""Running plans of small shell scripts: what is shown, who is blamed, what is left (nothing)."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from dataclasses import asdict

import pytest

from tfdist_ext.errors import LaunchError
from tfdist_ext.failures import Failure
from tfdist_ext.launcher import run
from tfdist_ext.launcher.plan import LaunchPlan, TaskPlan
from tfdist_ext.launcher.run import Limits, run_plan

pytestmark = pytest.mark.timeout(20)

SLEEP = "sleep 60"
IGNORES_TERM = "trap '' TERM; echo ready; while :; do sleep 0.05; done"


# What is shown, and what is kept


def test_lines_are_shown_with_aligned_task_names(run_tasks):
    ran = run_tasks({"chief:0": "echo a; echo b >&2; echo c", "worker:10": "echo d"})
    shown = ran.out.splitlines()
    assert [line for line in shown if line.startswith("[chief")] == [
        "[chief:0]   a",
        "[chief:0]   b",
        "[chief:0]   c",
    ]
    assert "[worker:10] d" in shown
    assert len(shown) == 4
    assert ran.err == ""
    assert ran.result.exit_status == 0
    assert ran.result.failed_task is None
    assert ran.result.last_lines == {"chief:0": ("a", "b", "c"), "worker:10": ("d",)}


def test_log_files_hold_every_byte(run_tasks, tmp_path):
    logs = tmp_path / "not" / "there" / "yet"
    run_tasks(
        {"worker:0": r"printf 'a\r\nb\rc\377\n\033[1m\nlast'", "worker:1": "echo one"}, log_dir=logs
    )
    assert (logs / "worker-0.log").read_bytes() == b"a\r\nb\rc\xff\n\x1b[1m\nlast"
    assert (logs / "worker-1.log").read_bytes() == b"one\n"


def test_progress_bar_is_shown_at_most_once_a_second(run_tasks, tmp_path):
    bar = r"for i in 1 2 3 4 5 6 7 8 9; do printf '\r%s0%%' $i; sleep 0.01; done; printf '\r100%%'"
    ran = run_tasks({"worker:0": bar + r"; printf '\ndone\n'"}, log_dir=tmp_path)
    lines = ran.lines("worker:0")
    assert lines[-2:] == ["100%", "done"]
    assert 3 <= len(lines) < 6, "a line a rewrite would drown the other tasks"
    assert (tmp_path / "worker-0.log").read_bytes().count(b"\r") == 10
    assert run_tasks({"worker:0": bar}).lines("worker:0")[-1] == "100%"


def test_tasks_get_their_variables_and_no_standard_input(mark):
    script = "test \"$(cat)\" = '' && test $ADDED = 'yes' && test $PYTHONUNBUFFERED = 1"
    plan = LaunchPlan((TaskPlan("worker:0", ("sh", "-c", script), {"ADDED": "yes"}),))
    assert run_plan(plan, Limits(), env=mark.env).exit_status == 0


# Who is blamed


def test_first_failure_is_the_root_cause(run_tasks, tmp_path):
    ran = run_tasks(
        {"worker:0": SLEEP, "worker:1": "seq 30; sleep 0.1; echo boom >&2; exit 3"},
        log_dir=tmp_path,
    )
    assert ran.result.exit_status == 3
    assert ran.result.failed_task == "worker:1"
    assert ran.result.returncodes == {"worker:0": -signal.SIGTERM, "worker:1": 3}
    assert ran.seconds < 3, "the sleeper was waited for"
    assert "tfdist: worker:1 failed; ending the other tasks\n" in ran.err
    assert re.search(r"worker:1 failed first, after 0\.\d s: exit code 3\n", ran.err)
    last = "".join(f"    {line}\n" for line in [*range(12, 31), "boom"])
    assert f"the last lines of worker:1:\n{last}" in ran.err
    assert f"its log: {tmp_path / 'worker-1.log'}" in ran.err
    assert "worker:0 killed by SIGTERM (signal 15)" in ran.err


def test_exception_is_reported_without_its_traceback(run_tasks):
    fails = """python3 -c '
import tfdist_ext
def step():
    raise ValueError("not today")
step()'"""
    ran = run_tasks({"worker:0": fails})
    assert ", in step" in ran.out
    assert ran.err.endswith("exit code 1\n    ValueError: not today\n")
    failure = ran.result.failures["worker:0"]
    assert (failure.type, failure.message, failure.peer) == ("ValueError", "not today", "")
    shown = [line.strip() for line in ran.lines("worker:0")]
    assert [line.strip() for line in failure.traceback.splitlines()] == shown


@pytest.mark.parametrize(
    ("code", "failure"),
    [
        ("sys.exit('no data')", "SystemExit: no data"),
        ("try: {}['rows']\nexcept KeyError: sys.exit(1)", "KeyError: 'rows'"),
        ("sys.exit(0)", None),
        ("import os, subprocess\nsubprocess.run([sys.executable, __file__, 'child'])", None),
    ],
)
def test_script_that_fails_writes_its_failure(run_tasks, tmp_path, code, failure):
    script = tmp_path / "train.py"
    text = f"import sys, tfdist_ext\nif len(sys.argv) > 1: sys.exit('a child')\n{code}\n"
    script.write_text(text)
    failures = run_tasks({"worker:0": f"{sys.executable} {script}"}).result.failures
    assert {name: str(told) for name, told in failures.items()} == (
        {} if failure is None else {"worker:0": failure}
    )


def test_tasks_that_fail_later_are_not_the_cause(run_tasks, tmp_path):
    failed = tmp_path / "failed"
    # All the others fail by themselves as soon as they notice, and with another code.
    scripts = {
        f"worker:{n}": f"while ! test -e {failed}; do sleep 0.01; done; exit 9" for n in range(3)
    }
    # The script that creates the file is gone when the file is there.
    scripts["worker:2"] = f"(sleep 0.15; : > {failed}) & sleep 0.1; exit 4"
    ran = run_tasks(scripts)
    assert (ran.result.failed_task, ran.result.exit_status) == ("worker:2", 4)


def blames(peer, message):
    """Shell code that writes a failure as tasks do."""
    failure = Failure("PeerError", f"{peer} {message}", peer, "Traceback ...")
    return f"echo '{json.dumps(asdict(failure))}' > $TFDIST_ERROR_FILE"


def test_task_that_left_with_0_is_named_as_the_cause(run_tasks):
    fails = f"sleep 0.3; {blames('worker:1', 'left at 12:03:04')}; exit 1"
    ran = run_tasks({"worker:0": fails, "worker:1": "echo done", "worker:2": SLEEP})
    assert (ran.result.failed_task, ran.result.exit_status) == ("worker:1", 1)
    assert re.search(r"worker:1 left, after 0\.\d s: .* the other tasks still needed it\n", ran.err)
    assert "the last lines of worker:1:\n    done\n" in ran.err
    assert re.search(r"worker:0 failed because of worker:1, after 0\.\d s", ran.err)
    assert "    PeerError: worker:1 left at 12:03:04\n" in ran.err


def test_blamed_task_that_is_still_failing_is_waited_for(run_tasks):
    """It tells the others before its process has ended."""
    fails = f"{blames('worker:1', 'failed at 12:03:04: OSError: disk full')}; exit 1"
    ran = run_tasks({"worker:0": fails, "worker:1": "sleep 0.5; echo OSError: disk full; exit 3"})
    assert (ran.result.failed_task, ran.result.exit_status) == ("worker:1", 3)
    assert "tfdist: worker:0 failed because of worker:1, after 0." in ran.err
    assert "tfdist: worker:1 failed first, after 0." in ran.err
    assert "OSError: disk full\n" in ran.err


@pytest.mark.parametrize(
    ("blaming", "coordinator", "end"),
    [("worker:1", None, "exit 1"), ("chief:0", "chief:0", "kill -KILL $$")],
)
def test_frozen_task_is_the_cause_although_another_one_ended(
    run_tasks, monkeypatch, blaming, coordinator, end
):
    monkeypatch.setattr(run, "_SETTLE", 0.2)
    scripts = {
        blaming: f"sleep 0.3; {blames('worker:0', 'has not answered')}; {end}",
        "worker:0": "kill -STOP $$",
        "ps:0": SLEEP,
    }
    ran = run_tasks(scripts, coordinator=coordinator)
    assert (ran.result.failed_task, ran.result.exit_status) == ("worker:0", 138)
    assert "tfdist: worker:0 does not answer; ending all tasks\n" in ran.err
    assert f"{blaming} failed because of worker:0" in ran.err
    assert "out of memory" not in ran.err


def test_killed_task_is_the_root_cause(run_tasks):
    ran = run_tasks({"worker:0": "kill -KILL $$", "worker:1": SLEEP})
    assert ran.result.exit_status == 137
    assert ran.result.returncodes["worker:0"] == -signal.SIGKILL
    assert "killed by SIGKILL (signal 9)" in ran.err
    assert "out of memory" in ran.err
    assert "worker:0 wrote nothing" in ran.err


# How the others are ended


def test_sigterm_comes_first_and_sigkill_after_the_grace(run_tasks):
    heeds = "trap 'echo saved; exit 0' TERM; echo ready; sleep 60 & wait"
    scripts = {"worker:0": IGNORES_TERM, "worker:1": "sleep 0.3; exit 3", "worker:2": heeds}
    ran = run_tasks(scripts, grace=0.5)
    assert ran.lines("worker:2") == ["ready", "saved"]
    assert ran.result.returncodes["worker:0"] == -signal.SIGKILL
    assert ran.result.exit_status == 3
    assert 0.8 <= ran.seconds < 3
    assert "worker:0 killed by SIGKILL" in ran.err


def test_preempted_tasks_may_end_by_themselves(run_tasks):
    goes_on = "trap 'echo ended' TERM; echo ready; sleep 0.5; exit 143"
    ran = run_tasks({"worker:0": "sleep 0.2; exit 143", "worker:1": goes_on})
    assert ran.lines("worker:1") == ["ready"]
    assert ran.result.returncodes == {"worker:0": 143, "worker:1": 143}
    assert ran.seconds < 3


def test_timeout_names_the_running_tasks(run_tasks):
    ran = run_tasks(
        {"worker:0": "echo waiting for worker:1; exec sleep 60", "worker:1": "exit 0"}, timeout=0.4
    )
    assert ran.result.exit_status == 124
    assert ran.result.failed_task is None
    assert "not finished after 0.4 s" in ran.err
    assert "    worker:0: waiting for worker:1\n" in ran.err
    assert "    worker:1" not in ran.err


# A coordinator


def test_success_of_the_coordinator_ends_the_run(run_tasks):
    lingers = "sleep 0.2; echo evaluated; exit 1"
    scripts = {
        "chief:0": "sleep 0.1",
        "worker:0": IGNORES_TERM,
        "ps:0": SLEEP,
        "evaluator:0": lingers,
    }
    ran = run_tasks(scripts, coordinator="chief:0", linger=0.3, grace=0.3)
    assert ran.lines("evaluator:0") == ["evaluated"]
    assert ran.result.exit_status == 0
    assert ran.result.failed_task is None
    assert [*ran.result.returncodes.values()] == [0, -9, -15, 1]
    assert 0.7 <= ran.seconds < 3
    assert ran.err == ""


def test_coordinator_saves_before_its_servers_end(run_tasks, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "_SETTLE", 0.1)
    server = tmp_path / "server"
    saves = f"sleep 0.3; kill -0 $(cat {server}) && echo saved; exit 143"
    scripts = {
        "chief:0": f"trap '{saves}' TERM; echo ready; sleep 60 & wait",
        "worker:0": "sleep 0.3; exit 143",
        "ps:0": f"echo $$ > {server}; exec sleep 60",
    }
    ran = run_tasks(scripts, coordinator="chief:0", grace=5)
    assert ran.lines("chief:0") == ["ready", "saved"]
    assert (ran.result.exit_status, ran.result.returncodes["chief:0"]) == (143, 143)
    assert ran.seconds < 4


# Nothing is left (run_tasks itself looks for leftovers at the end)


def test_child_that_outlives_its_task_is_killed(run_tasks):
    ran = run_tasks({"worker:0": f'sh -c "{IGNORES_TERM}" & sleep 0.3; exit 0'}, grace=0.3)
    assert ran.result.exit_status == 0
    assert 0.5 <= ran.seconds < 3


def test_no_signal_goes_to_a_reused_process_id(run_tasks, monkeypatch):
    """Its process is not reaped before the last signal, so its number is not used again."""
    was_there, killpg = [], os.killpg

    def recorded(group, number):
        was_there.append(os.path.exists(f"/proc/{group}"))
        killpg(group, number)

    monkeypatch.setattr(os, "killpg", recorded)
    run_tasks({"worker:0": "exit 0", "worker:1": "sleep 0.5; exit 3", "worker:2": SLEEP})
    assert len(was_there) >= 9
    assert all(was_there)


def test_failed_start_ends_the_started_tasks(mark, tmp_path):
    broken = tmp_path / "broken"
    broken.write_bytes(b"\x7fELF rubbish")
    broken.chmod(0o755)
    plan = LaunchPlan((TaskPlan("worker:0", ("sleep", "60")), TaskPlan("worker:1", (str(broken),))))
    with pytest.raises(LaunchError, match=r"worker:1 could not be started: .*broken"):
        run_plan(plan, Limits(), env=mark.env)
    assert mark.pids() == []
