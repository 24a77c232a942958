"""A Slurm of two nodes on this machine: munge, slurmctld and two slurmd, ended with the tests.

The nodes have loopback addresses of their own. Their names stand in /etc/hosts meanwhile.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

NODES = ("tfdist-n1", "tfdist-n2")
_PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch")
_PATH = f"{os.environ['PATH']}:/usr/sbin"
_MISSING = [name for name in _PROGRAMS if not shutil.which(name, path=_PATH)]
# Why there is none here; "" where there is one.
WHY_NOT = (
    "a Slurm of one's own needs root"
    if os.geteuid()
    else f"{', '.join(_MISSING)} not installed (apt-get install slurm-wlm munge)"
    if _MISSING
    else ""
)
_CONFIG = """\
ClusterName=tfdist
SlurmctldHost=localhost(127.0.0.1)
SlurmUser=root
SlurmctldPort=17010
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool-%n
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
KillWait=20
JobRequeue=1
SchedulerParameters=batch_sched_delay=0,sched_interval=2
JobAcctGatherType=jobacct_gather/none
NodeName=tfdist-n1 NodeHostname=localhost NodeAddr=127.0.0.1 Port=17011 CPUs=2 State=UNKNOWN
NodeName=tfdist-n2 NodeHostname=localhost NodeAddr=127.0.0.2 Port=17012 CPUs=2 State=UNKNOWN
PartitionName=main Nodes=tfdist-n1,tfdist-n2 Default=YES MaxTime=INFINITE State=UP
"""


@dataclass(frozen=True)
class Slurm:
    """A Slurm that runs.

    Attributes:
        env: with which its commands find it.
    """

    env: dict[str, str]

    def __call__(self, *words: str, check: bool = True) -> str:
        """What one of its commands prints."""
        done = subprocess.run(
            words, env={**os.environ, **self.env}, capture_output=True, text=True, timeout=120
        )
        assert not check or not done.returncode, f"{words}: {done.stderr}"
        return done.stdout.strip()

    def state(self, job: str) -> str:
        """The state of a job, as "RUNNING"."""
        shown = self("scontrol", "show", "job", job)
        return shown.partition("JobState=")[2].split()[0]

    def wait_for(self, job: str, states: tuple[str, ...], seconds: float) -> str:
        """Wait until a job is in one of these states; a job that is queued again starts soon."""
        deadline = time.monotonic() + seconds
        while (state := self.state(job)) not in states:
            assert time.monotonic() < deadline, f"job {job} is {state}, not {' or '.join(states)}"
            if state == "PENDING":
                # Slurm would wait two minutes. At once it may take the end of the script that has
                # queued the job again for that of the next run, which then is FAILED.
                time.sleep(4)
                self("scontrol", "update", f"JobId={job}", "StartTime=now", check=False)
            time.sleep(0.5)
        return state


@contextlib.contextmanager
def slurm(folder: Path) -> Iterator[Slurm]:
    """A Slurm whose files are in this folder; there is one at a time on a machine."""
    with open(Path(tempfile.gettempdir(), "tfdist-slurm.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with _running(folder) as running:
            yield running


@contextlib.contextmanager
def _running(folder: Path) -> Iterator[Slurm]:
    for name in ("munge", "state"):
        (folder / name).mkdir(mode=0o700)
    key = folder / "munge" / "key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    config = folder / "slurm.conf"
    config.write_text(_CONFIG.format(folder=folder))
    env = {"SLURM_CONF": str(config), "PATH": _PATH}
    munge = [f"--{name}-file={folder}/munge/{name}" for name in ("key", "pid", "log", "seed")]
    commands = [
        ["munged", "--foreground", "--force", *munge, f"--socket={folder}/munge/socket"],
        ["slurmctld", "-D", "-c", "-f", str(config)],
        *(["slurmd", "-D", "-c", "-f", str(config), "-N", node] for node in NODES),
    ]
    processes = []
    hosts = Path("/etc/hosts")
    before = hosts.read_text()
    try:
        hosts.write_text(f"{before}\n127.0.0.1 {NODES[0]}\n127.0.0.2 {NODES[1]}\n")
        for command in commands:
            with open(folder / f"{command[0]}.out", "ab") as output:
                processes.append(
                    subprocess.Popen(
                        command,
                        env={**os.environ, **env},
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                    )
                )
            if command[0] == "munged":
                _wait_until((folder / "munge" / "socket").exists, "munged")
        cluster = Slurm(env)
        _wait_until(
            lambda: cluster("sinfo", "-h", "-o", "%T %D", check=False) == "idle 2", "slurmd"
        )
        yield cluster
        cluster("scancel", "--user=root", check=False)
        _wait_until(lambda: not cluster("squeue", "-h", check=False), "the end of all jobs")
    finally:
        hosts.write_text(before)
        for process in reversed(processes):
            process.terminate()
        for process in processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_until(is_so: object, what: str) -> None:
    deadline = time.monotonic() + 40
    assert callable(is_so)
    while not is_so():
        assert time.monotonic() < deadline, f"{what} did not come"
        time.sleep(0.2)
