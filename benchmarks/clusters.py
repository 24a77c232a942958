"""Runs a program as all tasks of a cluster on this machine."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tfdist_ext.launcher.plan import local_plan
from tfdist_ext.launcher.run import Limits, run_plan
from tfdist_ext.placement.scaling import parse_rate, parse_seconds

__all__ = ["SlowNetwork", "output_of_chief", "outputs_in_namespaces", "outputs_of_tasks"]

DELAYED_LINKS = Path(__file__).resolve().parent / "programs" / "delayed_links.py"


def output_of_chief(command: list[str], *, workers: int, ps: int) -> tuple[int, str]:
    """(exit status of the run, what its chief printed)."""
    status, outputs = outputs_of_tasks(command, workers=workers, ps=ps)
    return status, outputs["chief-0"]


def outputs_of_tasks(
    command: list[str], *, workers: int, ps: int = 0, **variables: str
) -> tuple[int, dict[str, str]]:
    """(exit status of the run, what each task printed, by names as "worker-0").

    Args:
        variables: of the environment, beside those of this process.
    """
    env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", **variables}
    env.pop("TF_CONFIG", None)
    with (
        tempfile.TemporaryDirectory() as folder,
        open(os.devnull, "w") as nowhere,
        local_plan(command, workers=workers, ps=ps, log_dir=folder, env=env) as plan,
    ):
        limits = Limits(grace=1, linger=0, timeout=1800)
        result = run_plan(plan, limits, env=env, stream=nowhere)
        logs = {path.stem: path.read_text() for path in Path(folder).glob("*.log")}
        return result.exit_status, logs


def outputs_in_namespaces(command: list[str], *, workers: int) -> tuple[int, dict[str, str]]:
    """As `outputs_of_tasks`, each worker in a network namespace of its own. Needs root."""
    with SlowNetwork(workers) as network:
        processes = network.started(command)
        outputs = [process.communicate()[0] for process in processes]
    status = max(abs(process.returncode) for process in processes)
    return status, {f"worker-{number}": text for number, text in enumerate(outputs)}


class SlowNetwork:
    """Runs workers in network namespaces with a limited bandwidth. Needs root.

    Args:
        has_latency: messages can be delayed. This costs time of a processor for each packet.
    """

    def __init__(self, workers: int, *, has_latency: bool = False):
        sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "environments"))
        from namespaces import hosts

        self._scope = hosts(workers)
        self._has_latency = has_latency
        self._links: subprocess.Popen[str] | None = None
        self._ports = itertools.count(2222)
        self._processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> SlowNetwork:
        self._machines = self._scope.__enter__()
        if self._has_latency:
            try:
                self._links = self._delayed_links()
            except BaseException:
                self.__exit__(*sys.exc_info())  # removes the namespaces
                raise
        return self

    def __exit__(self, *error: Any) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        self._scope.__exit__(*error)

    def _delayed_links(self) -> subprocess.Popen[str]:
        """Replaces the interface of each namespace by one whose packets can be delayed."""
        hosts = []
        for number, address in enumerate(self._machines.addresses):
            command = self._machines.command(number, "ip", "link", "del", "eth0")
            subprocess.run(command, check=True)
            hosts.append(f"{self._machines.names[number]}={address}")
        links = subprocess.Popen(
            [sys.executable, str(DELAYED_LINKS), *hosts],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._processes.append(links)
        assert links.stdout is not None
        if not links.stdout.readline():
            raise SystemExit(f"{DELAYED_LINKS.name} failed: status {links.wait()}")
        return links

    def started(self, command: list[str]) -> list[subprocess.Popen[str]]:
        """The processes of a job: a worker in each namespace."""
        port, processes = next(self._ports), []
        addresses = [f"{address}:{port}" for address in self._machines.addresses]
        for number in range(len(addresses)):
            task = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": number}}
            process = subprocess.Popen(
                self._machines.command(number, *command),
                env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", "TF_CONFIG": json.dumps(task)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            processes.append(process)
        self._processes += processes
        return processes

    def limit(self, rate: str, latency: str = "") -> None:
        """Limits what each worker may send.

        Args:
            rate: such as "1gbit".
            latency: of a message, as "1ms"; "" for none, without `has_latency`.
        """
        for number in range(len(self._machines.addresses)):
            delete = self._machines.command(number, "tc", "qdisc", "del", "dev", "eth0", "root")
            subprocess.run(delete, check=False, stderr=subprocess.DEVNULL)
            bits = parse_rate(rate) * 8
            if self._links is not None:
                # A packet has to be smaller than `burst`.
                words = ["ip", "link", "set", "eth0", "mtu", "9000" if bits < 5e9 else "60000"]
                subprocess.run(self._machines.command(number, *words), check=True)
            # What an idle link may send at once: less than the gradients of a small model, which
            # would otherwise pass faster than the rate.
            burst = str(max(16_000, int(bits / 8 / 2000)))
            words = ["tc", "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", rate]
            words += ["burst", burst, "latency", "400ms"]
            subprocess.run(self._machines.command(number, *words), check=True)
        if self._links is not None:
            assert self._links.stdin is not None
            self._links.stdin.write(f"{parse_seconds(latency or 0, 'latency')}\n")
            self._links.stdin.flush()
