"""`tfdist run --hosts` over real sshd processes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ssh_machines
from conftest import TFDIST, Result, Starter, assert_equal, result_in, training
from ssh_machines import Machines
from task_programs import LEFT_OUT

pytestmark = [
    pytest.mark.skipif(bool(ssh_machines.WHY_NOT), reason=ssh_machines.WHY_NOT or "-"),
    pytest.mark.timeout(180),
]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    with ssh_machines.ssh_machines(tmp_path_factory.mktemp("ssh"), 3) as machines:
        yield machines


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    """Some that are not used again."""
    folder = tmp_path / "ssh"
    folder.mkdir()
    with ssh_machines.ssh_machines(folder, 2) as machines:
        yield machines


def hosts_file(folder: Path, machines: Machines) -> str:
    path = folder / "hosts.toml"
    listed = ", ".join(f'"{address}"' for address in machines.addresses)
    path.write_text(
        f'hosts = [{listed}]\ndirectory = "{folder}"\ntfdist = "{TFDIST}"\n'
        f'env = {{ MARK = "{folder}", PYTHONPATH = "{LEFT_OUT}", TF_CPP_MIN_LOG_LEVEL = "3" }}\n'
    )
    return str(path)


def marked(folder: Path) -> list[str]:
    """The commands of the processes that were started on the machines."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if f"\0MARK={folder}\0" in f"\0{Path('/proc', name, 'environ').read_text()}\0":
                found.append(Path("/proc", name, "cmdline").read_text().replace("\0", " "))
        except (OSError, UnicodeDecodeError):
            continue
    return found


def gone(folder: Path, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while marked(folder):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def test_a_training_that_is_killed_and_goes_on(
    start: Starter,
    shared: Machines,
    tmp_path: Path,
    undisturbed: Callable[[int, int], Result],
) -> None:
    words = ("--hosts", hosts_file(tmp_path, shared), "--ssh", shared.ssh, "--max-restarts", "2")
    run = start(TFDIST, "run", *words, "--", *training(tmp_path, 3, 8))
    run.wait_for("[worker:2] STEP 10")
    _kill_worker(tmp_path, 2)
    assert run.ended() == 0
    assert run.output.count("tfdist: restart 1 of 2\n") == 1  # said once, not on each machine
    assert "tfdist: worker:2 failed first" in run.output
    assert_equal(result_in(tmp_path), undisturbed(3, 8))
    assert gone(tmp_path, 5)


def _kill_worker(folder: Path, index: int) -> None:
    task = f'"index": {index}'
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            environ = Path("/proc", name, "environ").read_text()
        except (OSError, UnicodeDecodeError):
            continue
        if f"MARK={folder}" in environ and "TF_CONFIG" in environ and task in environ:
            os.kill(int(name), signal.SIGKILL)
            return
    pytest.fail(f"there is no worker {index}")


def test_the_first_failure_is_the_cause_and_its_status_that_of_the_run(
    start: Starter, shared: Machines, tmp_path: Path
) -> None:
    words = ("--hosts", hosts_file(tmp_path, shared), "--ssh", shared.ssh)
    script = 'case "$TF_CONFIG" in *\'"index": 1\'*) echo boom; exit 7;; esac; sleep 60'
    run = start(TFDIST, "run", *words, "--", "sh", "-c", script)
    assert run.ended(40) == 7
    assert run.output.count("tfdist: worker:1 failed first") == 1
    assert "    boom\n" in run.output
    assert f"tfdist: its log: {shared.addresses[1]}:/" in run.output
    assert gone(tmp_path, 5)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_here_reaches_all(
    start: Starter, shared: Machines, tmp_path: Path, number: int, status: int
) -> None:
    words = ("--hosts", hosts_file(tmp_path, shared), "--ssh", shared.ssh)
    script = "trap 'echo told; exit 143' TERM; echo there; while :; do sleep 0.1; done"
    run = start(TFDIST, "run", *words, "--", "sh", "-c", script)
    for worker in range(3):
        run.wait_for(f"[worker:{worker}] there")
    os.kill(run.popen.pid, number)
    assert run.ended(30) == status
    assert {f"[worker:{worker}] told" for worker in range(3)} <= set(run.output.splitlines())
    assert gone(tmp_path, 5)


def test_nothing_is_left_where_the_terminal_is_gone(
    start: Starter, shared: Machines, tmp_path: Path
) -> None:
    words = ("--hosts", hosts_file(tmp_path, shared), "--ssh", shared.ssh)
    run = start(TFDIST, "run", *words, "--", "sh", "-c", "echo there; sleep 120")
    for worker in range(3):
        run.wait_for(f"[worker:{worker}] there")
    os.kill(run.popen.pid, signal.SIGKILL)
    assert gone(tmp_path, 30), marked(tmp_path)


def test_nothing_is_left_where_a_connection_is_gone(
    start: Starter, machines: Machines, tmp_path: Path
) -> None:
    words = ("--hosts", hosts_file(tmp_path, machines), "--ssh", machines.ssh)
    run = start(TFDIST, "run", *words, "--", "sh", "-c", "echo there; sleep 120")
    for worker in range(2):
        run.wait_for(f"[worker:{worker}] there")
    machines.cut(1)
    assert run.ended(40) >= 128
    assert f"node 1 ({machines.addresses[1]}): ssh has no connection" in run.output
    assert gone(tmp_path, 30), marked(tmp_path)


def test_a_machine_that_cannot_be_reached_is_named(
    start: Starter, machines: Machines, tmp_path: Path
) -> None:
    words = ("--hosts", hosts_file(tmp_path, machines), "--ssh", machines.ssh)
    machines.cut(1)
    run = start(TFDIST, "run", *words, "--", "sh", "-c", "sleep 120")
    assert run.ended(60) >= 128
    assert f"node 1 ({machines.addresses[1]}): ssh has no connection" in run.output
    assert "Connection refused" in run.output
    assert gone(tmp_path, 30), marked(tmp_path)
