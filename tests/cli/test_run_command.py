"""The command `tfdist run`, as a process: signals sent to it, what it prints, what it leaves."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import check_dead

from tfdist_ext import cli
from tfdist_ext.cluster import ClusterConfig

pytestmark = pytest.mark.timeout(25)

ROOT = Path(__file__).resolve().parents[2]
# Each task: a shell that ignores SIGTERM, and a child of it that does, too.
STUBBORN = "trap '' TERM; sleep 60 & echo ready; while :; do sleep 0.05; done"


def start_stubborn(tfdist, mark, *options):
    """A run of two stubborn tasks, all of whose processes are there."""
    launcher = tfdist("run", "--workers", "2", *options, "--", "sh", "-c", STUBBORN)
    lines = [launcher.stdout.readline() for _ in range(2)]
    assert sorted(lines) == ["[worker:0] ready\n", "[worker:1] ready\n"]
    # The launcher, its watchdog, two shells, and at least two sleeps.
    assert len(mark.pids()) >= 6
    return launcher


def test_signal_ends_all_processes_within_the_grace(tfdist, mark):
    launcher = start_stubborn(tfdist, mark, "--grace", "0.5")
    start = time.monotonic()
    launcher.send_signal(signal.SIGHUP)
    _, err = launcher.communicate(timeout=10)
    assert launcher.returncode == 129
    assert 0.5 <= time.monotonic() - start < 4
    assert mark.pids() == []
    assert "tfdist: SIGHUP: ending 2 tasks within 0.5 s" in err
    assert "Traceback" not in err
    assert "failed" not in err


def test_second_ctrl_c_kills_at_once(tfdist, mark):
    launcher = start_stubborn(tfdist, mark, "--grace", "60")
    assert "process ids" in launcher.stderr.readline()
    launcher.send_signal(signal.SIGINT)
    assert "send it again" in launcher.stderr.readline()
    time.sleep(1.1)  # the same signal within a second is the same request
    assert launcher.poll() is None, "the first one was enough"
    launcher.send_signal(signal.SIGINT)
    launcher.communicate(timeout=3)
    assert launcher.returncode == 130
    assert mark.pids() == []


def test_ctrl_c_of_a_terminal_reaches_only_the_launcher(tfdist):
    # A terminal sends it to its whole foreground group; the tasks are to get SIGTERM, once.
    script = "trap 'echo INT' INT; trap 'echo TERM; exit' TERM; echo ready; sleep 60 & wait; wait"
    launcher = tfdist("run", "--", "sh", "-c", script)
    assert launcher.stdout.readline() == "[worker:0] ready\n"
    os.killpg(launcher.pid, signal.SIGINT)
    out, _ = launcher.communicate(timeout=10)
    assert (launcher.returncode, out) == (130, "[worker:0] TERM\n")


def test_run_ends_although_sigchld_was_ignored(mark):
    program = (
        "import signal, sys; from tfdist_ext import cli;"
        " signal.signal(signal.SIGCHLD, signal.SIG_IGN); sys.exit(cli.main())"
    )
    command = [sys.executable, "-c", program, "run", "--", "true"]
    ended = subprocess.run(command, env=mark.env, capture_output=True, text=True, timeout=20)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_killed_launcher_leaves_no_process(tfdist, mark):
    script = f"env -i sleep 60 & echo $!; {STUBBORN}"  # a child with another environment, too
    launcher = tfdist("run", "--", "sh", "-c", script)
    pid = int(launcher.stdout.readline().split()[1])
    assert "ready" in launcher.stdout.readline()
    os.killpg(launcher.pid, signal.SIGKILL)
    launcher.wait(timeout=5)
    assert mark.wait_for(0, seconds=8) == []
    check_dead([pid])


def test_run_reports_ids_and_an_ignored_tf_config_and_deletes_its_logs(tfdist, tmp_path):
    given = '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}}'
    script = f"echo id $$; echo $TF_CONFIG; ls {tmp_path}"
    words = ("run", "--workers", "2", "--", "sh", "-c", script)
    launcher = tfdist(*words, TF_CONFIG=given, TMPDIR=str(tmp_path))
    out, err = launcher.communicate(timeout=10)
    assert launcher.returncode == 0
    assert "127.0.0.1:" in out
    assert "tfdist: TF_CONFIG is set, and is not used:" in err
    ids = dict(re.findall(r"\[(worker:\d)\] id (\d+)", out))
    assert dict(re.findall(r"(worker:\d) (\d+)", err)) == ids
    folders = re.findall(r"\[worker:0\] (tfdist.*)-\w{8}\n", out)
    assert sorted(folders) == ["tfdist", "tfdist-errors"]  # they were there during the run
    assert list(tmp_path.iterdir()) == []


def test_unknown_program_leaves_no_folder(tfdist, tmp_path):
    launcher = tfdist("run", "--", "no-such-program", TMPDIR=str(tmp_path))
    launcher.communicate(timeout=10)
    assert launcher.returncode == 2
    assert list(tmp_path.iterdir()) == []


def test_tasks_that_never_join_the_cluster_are_reported(tfdist):
    listens = (
        "import json, os, socket, time; config = json.loads(os.environ['TF_CONFIG']);"
        "port = int(config['cluster']['worker'][config['task']['index']].rpartition(':')[2]);"
        "server = socket.create_server(('', port)); time.sleep(1)"
    )
    for script, joins in {"print('hello')": False, listens: True}.items():
        launcher = tfdist("run", "--workers", "2", "--", "python", "-c", script)
        _, err = launcher.communicate(timeout=10)
        assert launcher.returncode == 0
        assert ("tfdist: no task joined the cluster: each task ran alone" in err) == (not joins)


# Without starting anything


def run_main(capsys, *words):
    status = cli.main(words)
    return status, *capsys.readouterr()


def test_dry_run_prints_lines_a_shell_can_run(capsys, tmp_path):
    status, out, err = run_main(
        capsys, "run", "--workers", "2", "--log-dir", str(tmp_path / "logs"), "--dry-run",
        "--", "sh", "-c", "printf '%s' \"$TF_CONFIG\"",
    )  # fmt: skip
    assert (status, err) == (0, "")
    tasks = []
    for line in out.splitlines():
        said = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=True)
        tasks.append(str(ClusterConfig.from_tf_config(said.stdout).task))
    assert tasks == ["worker:0", "worker:1"]
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "--workers", "2", "python", "train.py", "--epochs", "3"],
         "Write: tfdist run [options] -- python train.py --epochs 3"),
        (["run", "--wrokers", "2", "--", "true"],
         "unknown arguments: --wrokers 2. See tfdist run --help."),
        (["run", "--preemption-signal", "HELLO", "--", "true"],
         "invalid choice: 'HELLO' (choose from"),
        (["run", "--grace", "-1", "--", "true"], "seconds must be a number from 0, got '-1'"),
        (["run", "--workers", "99999", "--", "true"], "ask for fewer tasks"),
    ],
)  # fmt: skip
def test_command_line_error_is_one_line_and_a_link(capsys, words, said):
    status, out, err = run_main(capsys, *words)
    assert (status, out) == (2, "")
    line, link = err.splitlines()
    assert line.startswith("tfdist: error: ")
    assert said in line
    assert re.fullmatch(r'Help: /.*/docs/error_messages\.md, section ".*"', link)
