"""`tfdist run --isolate`: what its tasks reach, and who reaches them; as root, and as any user."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pages import ROOT, blocks_of, commands_of

from tfdist_ext import cli
from tfdist_ext.launch import isolation

pytestmark = pytest.mark.timeout(60)

NOBODY = 65534
# The first task listens as TensorFlow does, on every interface; the second one connects to it by
# the address that TF_CONFIG gives it. Both stay until a file is there.
SERVER = """\
import os, pathlib, socket, sys, time
import tfdist_ext as tfd
cluster = tfd.ClusterConfig.from_env()
port = int(cluster.jobs["worker"][0].rpartition(":")[2])
if cluster.task.index == 0:
    server = socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    print("user", os.geteuid(), "group", os.getegid())
    print("port", port)
    with server.accept()[0] as other:
        other.sendall(b"hello")
else:
    for _ in range(100):
        try:
            with socket.create_connection(("127.0.0.1", port)) as first:
                heard = first.recv(5)
            break
        except OSError:
            time.sleep(0.05)
    print("heard", heard.decode())
while not pathlib.Path("stop").exists():
    time.sleep(0.05)
sys.exit(int(sys.argv[1]) * cluster.task.index)
"""


def addresses_of_this_machine() -> list[str]:
    """One of each way in: loopback, and what others know it by."""
    found = ["127.0.0.1", "::1"]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect(("192.0.2.1", 9))  # sends nothing
        found.append(probe.getsockname()[0])
    return found


def answers(port: int) -> list[str]:
    reached = []
    for address in addresses_of_this_machine():
        with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=2):
            reached.append(address)
    return reached


PACKAGES = f"{ROOT}:{sysconfig.get_path('purelib')}"


def python_for(user: int) -> tuple[str, str]:
    """A Python that this user may run and isolate with, or why there is none."""
    code = "from tfdist_ext.launch import isolation; isolation.enter_own_network()"
    reason = "becoming another user needs root"
    # That of the tests may be in the home of another user; the system's is not.
    for python in (sys.executable, f"/usr/bin/python3.{sys.version_info.minor}"):
        with contextlib.suppress(OSError):
            done = subprocess.run(
                [python, "-c", code],
                cwd="/",
                user=user,
                env={"PYTHONPATH": PACKAGES},
                capture_output=True,
                text=True,
            )
            if not done.returncode:
                return python, ""
            reason = done.stderr.strip().rpartition("\n")[2]
    return "", reason


@pytest.fixture(params=[os.geteuid(), NOBODY], ids=["this user", "nobody"])
def user(request) -> int:
    return request.param


@pytest.fixture
def python(user: int) -> str:
    found, reason = python_for(user)
    if not found:
        pytest.skip(reason)
    return found


@pytest.fixture
def folder(user: int, python: str) -> Iterator[Path]:
    """One that this user may write to; pytest's own are closed to others."""
    with tempfile.TemporaryDirectory() as name:
        os.chown(name, user, -1)
        (Path(name) / "train.py").write_text(SERVER)
        yield Path(name)


@pytest.fixture
def run(
    mark, user: int, python: str, folder: Path
) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    started = []

    def start(*words: str) -> subprocess.Popen[str]:
        popen = subprocess.Popen(
            [python, "-m", "tfdist_ext.cli", "run", "--workers", "2", *words],
            cwd=folder,
            user=user,
            group=user if user == NOBODY else None,
            extra_groups=[] if user == NOBODY else None,
            env={**mark.env, "TMPDIR": str(folder), "PYTHONPATH": PACKAGES},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(popen)
        return popen

    yield start
    for popen in started:
        with popen:
            popen.kill()


TRAIN = ("--", "python", "train.py")


def lines_of(popen: subprocess.Popen[str]) -> dict[str, str]:
    """What the two tasks have said, once they have."""
    said = [popen.stdout.readline() for _ in range(3)]
    return dict(line.split("] ")[1].split(maxsplit=1) for line in said)


@pytest.mark.parametrize("isolate", [True, False])
def test_who_reaches_a_task(run, folder, user, mark, isolate):
    """The other task always; others only without --isolate. The exit status is that of a task."""
    popen = run(*["--isolate"] * isolate, "--log-dir", "logs", *TRAIN, "3")
    said = lines_of(popen)
    port = int(said["port"])
    assert said["heard"] == "hello\n"
    assert said["user"] == f"{user} group {user if user == NOBODY else os.getegid()}\n"
    assert bool(answers(port)) is not isolate
    (folder / "stop").touch()
    _, err = popen.communicate(timeout=20)
    assert popen.returncode == 3
    assert "tfdist: worker:1 failed first" in err
    assert mark.pids() == []
    assert (folder / "logs" / "worker-0.log").stat().st_uid == user


def test_the_tasks_reach_no_one(run, mark, user):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"import socket; socket.create_connection(('127.0.0.1', {port}), timeout=5)"
        assert run("--", "python", "-c", code).wait(timeout=20) == 0
        _, err = run("--isolate", "--", "python", "-c", code).communicate(timeout=20)
    assert "ConnectionRefusedError" in err


@pytest.mark.parametrize(
    ("number", "status", "said"),
    [(signal.SIGINT, 130, "SIGINT: ending 2 tasks"), (signal.SIGTERM, 143, "SIGTERM: ending 2")],
)
def test_signals_end_all_of_it(run, mark, number, status, said):
    """The script's own children, too, in sessions of their own."""
    code = (
        "import subprocess, time\n"
        "child = subprocess.Popen(['sleep', '61'], start_new_session=True)\n"
        "print('ready')\ntime.sleep(60)"
    )
    popen = run("--isolate", "--", "python", "-c", code)
    for _ in range(2):
        assert "ready" in popen.stdout.readline()
    assert len(mark.pids()) == 6  # tfdist, its watchdog, two tasks and a child of each
    popen.send_signal(number)
    _, err = popen.communicate(timeout=20)
    assert popen.returncode == status
    assert said in err
    assert mark.pids() == []


def test_a_kill_of_the_launcher_leaves_nothing(run, mark):
    popen = run("--isolate", "--", "sh", "-c", "echo ready; sleep 60")
    for _ in range(2):
        assert "ready" in popen.stdout.readline()
    popen.kill()
    popen.wait()
    assert mark.wait_for(0, seconds=5) == []


def test_it_starts_again(run, folder):
    code = "import os, sys; sys.exit(138 if os.environ['TFDIST_RESTARTS'] == '0' else 0)"
    popen = run("--isolate", "--max-restarts", "1", "--", "python", "-c", code)
    _, err = popen.communicate(timeout=20)
    assert popen.returncode == 0
    assert "failed first" in err


@pytest.mark.parametrize(
    "words",
    [
        ["--nodes", "2", "--node-rank", "0", "--rendezvous", "localhost:29400"],
        ["--hosts", "hosts.toml"],
        ["--slurm"],
    ],
)
def test_it_is_for_one_machine(capsys, words):
    assert cli.main(["run", "--isolate", *words, "--", "python", "train.py"]) == 2
    assert "--isolate must come without --nodes, --hosts and --slurm" in capsys.readouterr().err


def test_nodes_of_the_environment(capsys, monkeypatch):
    monkeypatch.setenv("TFDIST_NODES", "2")
    assert cli.main(["run", "--isolate", "--", "python", "train.py"]) == 2
    assert "--isolate must come without --nodes" in capsys.readouterr().err


def test_who_may_not_is_told_what_to_do(mark, tmp_path):
    """A user namespace in which no other may be made: for this kernel any user is one who may not.

    That is what `sysctl user.max_user_namespaces=0` does to all.
    """
    if os.geteuid() or not shutil.which("unshare"):
        pytest.skip("limits of namespaces are set by root, in a namespace by unshare")
    limit = "echo 0 > /proc/sys/user/max_net_namespaces"
    tfdist = f"{sys.executable} -m tfdist_ext.cli run --isolate -- touch started"
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "sh", "-c", f"{limit} && exec {tfdist}"],
        cwd=tmp_path,
        env=mark.env,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 2, done.stderr
    assert "--isolate must be allowed to make a network namespace, got [Errno 28]" in done.stderr
    assert "or leave it out" in done.stderr
    assert not (tmp_path / "started").exists()


def test_other_systems_are_told_so(monkeypatch, capsys):
    monkeypatch.setattr(isolation.sys, "platform", "darwin")
    assert cli.main(["run", "--isolate", "--", "python", "train.py"]) == 2
    assert "must have Linux's network namespaces, got darwin" in capsys.readouterr().err


@pytest.mark.timeout(150)
@pytest.mark.parametrize("isolate", [True, False])
def test_tensorflow(run, mark, folder, isolate):
    """The script of docs/security.md, by its command; it ends when it is told to."""
    (script,) = [each for each in blocks_of("docs/security.md") if each.file == "train.py"]
    (command,) = [line for line, _ in commands_of("docs/security.md") if "--isolate" in line]
    assert command == "tfdist run --isolate --workers 2 -- python train.py"
    wait = "import pathlib, time\nwhile not pathlib.Path('stop').exists():\n    time.sleep(0.1)\n"
    (folder / "train.py").write_text(f"{script.program}\n{wait}")
    python = ("--", "python", "-W", "default")  # TensorFlow's own warnings are no errors
    popen = run(*["--isolate"] * isolate, *python, "train.py")
    trained = set()
    for line in popen.stdout:  # until both have
        trained |= {line} if line.endswith("] trained\n") else set()
        if len(trained) == 2:
            break
    assert trained == {"[worker:0] trained\n", "[worker:1] trained\n"}
    ports = [int(port) for port in re.findall(r":(\d+)\\?\"", tf_configs(mark))]
    assert len(set(ports)) == 2
    for port in ports:
        assert bool(answers(port)) is not isolate
    (folder / "stop").touch()
    assert popen.wait(timeout=30) == 0
    assert mark.pids() == []


def tf_configs(mark) -> str:
    """The TF_CONFIG of each process."""
    found = ""
    for pid in mark.pids():
        environ = Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0")
        found += "".join(each for each in environ if each.startswith("TF_CONFIG="))
    return found
