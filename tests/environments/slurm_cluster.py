"""A Slurm of two nodes on this machine: munge, slurmctld and two slurmd, ended with the tests.

The controller and each node run in a network namespace, because TensorFlow's servers listen on
every address of their host. They have an /etc/hosts of their own, with the names of the nodes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import namespaces
from namespaces import Hosts

NODES = ("tfdist-n1", "tfdist-n2")
_PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch")
_PATH = f"{os.environ['PATH']}:/usr/sbin"
_MISSING = [name for name in _PROGRAMS if not shutil.which(name, path=_PATH)]
# Why there is none here; "" where there is one.
WHY_NOT = namespaces.WHY_NOT or (
    f"{', '.join(_MISSING)} not installed (apt-get install slurm-wlm munge)" if _MISSING else ""
)
_CONFIG = """\
ClusterName=tfdist
SlurmctldHost=localhost({controller})
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
NodeName=tfdist-n1 NodeHostname=localhost NodeAddr={node1} Port=17011 CPUs=2 State=UNKNOWN
NodeName=tfdist-n2 NodeHostname=localhost NodeAddr={node2} Port=17012 CPUs=2 State=UNKNOWN
PartitionName=main Nodes=tfdist-n1,tfdist-n2 Default=YES MaxTime=INFINITE State=UP
"""


@dataclass(frozen=True)
class Slurm:
    """A Slurm that runs.

    Attributes:
        env: with which its commands find it.
        hosts: its nodes, and the controller behind them.
        names: the /etc/hosts of them all.
    """

    env: dict[str, str]
    hosts: Hosts
    names: Path

    def command(self, *words: str) -> list[str]:
        """The command that runs these words beside the controller."""
        return _on(self.hosts, len(NODES), self.names, *words)

    def __call__(self, *words: str, check: bool = True) -> str:
        """What one of its commands prints."""
        done = subprocess.run(
            self.command(*words),
            env={**os.environ, **self.env},
            capture_output=True,
            text=True,
            timeout=120,
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


def _on(hosts: Hosts, host: int, names: Path, *words: str) -> list[str]:
    """The command that runs these words on a host; `ip netns exec` would hide /sys/fs/cgroup."""
    mounted = 'mount --bind "$0" /etc/hosts && exec "$@"'
    command = ["nsenter", f"--net=/run/netns/{hosts.names[host]}", "unshare", "--mount"]
    return [*command, "sh", "-c", mounted, str(names), *words]


@contextlib.contextmanager
def slurm(folder: Path) -> Iterator[Slurm]:
    """A Slurm cluster that keeps its files in this folder."""
    with namespaces.hosts(len(NODES) + 1) as hosts, contextlib.ExitStack() as stack:
        for name in ("munge", "state"):
            (folder / name).mkdir(mode=0o700)
        key = folder / "munge" / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        node1, node2, controller = hosts.addresses
        config, names = folder / "slurm.conf", folder / "hosts"
        addresses = {"node1": node1, "node2": node2, "controller": controller}
        config.write_text(_CONFIG.format(folder=folder, **addresses))
        of_machine = Path("/etc/hosts").read_text()
        names.write_text(f"{of_machine}\n{node1} {NODES[0]}\n{node2} {NODES[1]}\n")
        cluster = Slurm({"SLURM_CONF": str(config), "PATH": _PATH}, hosts, names)

        munge = [f"--{name}-file={folder}/munge/{name}" for name in ("key", "pid", "log", "seed")]
        munge.append(f"--socket={folder}/munge/socket")
        stack.enter_context(_started(cluster, folder, "munged", "--foreground", "--force", *munge))
        _wait_until((folder / "munge" / "socket").exists, "munged")
        slurmctld = cluster.command("slurmctld", "-D", "-c", "-f", str(config))
        stack.enter_context(_started(cluster, folder, *slurmctld))
        for host, node in enumerate(NODES):
            slurmd = _on(hosts, host, names, "slurmd", "-D", "-c", "-f", str(config), "-N", node)
            stack.enter_context(_started(cluster, folder, *slurmd))
        _wait_until(
            lambda: cluster("sinfo", "-h", "-o", "%T %D", check=False) == "idle 2", "slurmd"
        )
        yield cluster
        cluster("scancel", "--user=root", check=False)
        _wait_until(lambda: not cluster("squeue", "-h", check=False), "the end of all jobs")


@contextlib.contextmanager
def _started(cluster: Slurm, folder: Path, *words: str) -> Iterator[None]:
    """A process that ends with the body."""
    with open(folder / "daemons.out", "ab") as output:
        process = subprocess.Popen(
            words,
            env={**os.environ, **cluster.env},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until(is_so: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 40
    while not is_so():
        assert time.monotonic() < deadline, f"{what} did not come"
        time.sleep(0.2)
