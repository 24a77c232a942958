"""Pods that are played: a process each, on a host of its own, with the names Kubernetes gives."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import namespaces
from kubernetes_controllers import JobController, JobSetController, Manifest, Pod
from namespaces import Hosts

_BACKOFF = 1.0  # seconds; Kubernetes waits for ten, and then longer


def controller_of(documents: list[Manifest]) -> JobController | JobSetController:
    """The controller of the job among these manifests."""
    (job,) = (each for each in documents if each["kind"] in ("Job", "JobSet"))
    kind = JobController if job["kind"] == "Job" else JobSetController
    return kind(job["metadata"]["name"], job["spec"])


@dataclass
class _Running:
    popen: subprocess.Popen[bytes]
    log: Path
    host: int
    deleted: float | None = None  # since when
    disrupted: bool = False


@dataclass
class Pods:
    """The pods of one job.

    Attributes:
        ends: the pods that have ended, with their statuses.
    """

    controller: JobController | JobSetController
    service: str
    folder: Path
    hosts: Hosts
    hosts_file: Path
    running: dict[Pod, _Running] = field(default_factory=dict)
    logs: dict[str, list[Path]] = field(default_factory=dict)
    ends: list[tuple[str, int]] = field(default_factory=list)
    free: list[int] = field(default_factory=list)
    due: dict[Pod, float] = field(default_factory=dict)

    def output(self, hostname: str) -> str:
        """What the pods of this name have written, all of them."""
        logs = self.logs.get(hostname, [])
        return "".join(log.read_text(errors="replace") for log in logs)

    def until(self, hostname: str, text: str, seconds: float = 90) -> None:
        """Go on until a pod has written this."""
        deadline = time.monotonic() + seconds
        while text not in self.output(hostname):
            assert time.monotonic() < deadline, self.told(f"{hostname}: no {text!r}")
            assert not self.controller.state, self.told(f"{hostname}: no {text!r}")
            self.step()

    def until_ended(self, seconds: float = 150) -> str:
        """Go on until the job has ended, and its pods are gone; its state."""
        deadline = time.monotonic() + seconds
        while not self.controller.state or self.running:
            assert time.monotonic() < deadline, self.told("the job did not end")
            self.step()
        return self.controller.state

    def kill(self, hostname: str) -> None:
        """As if its container had used too much memory."""
        self._named(hostname).popen.kill()

    def evict(self, hostname: str, disrupted: bool = False) -> None:
        """Delete a pod: SIGTERM, and SIGKILL when its grace is over.

        Args:
            disrupted: it gets the condition DisruptionTarget, as from a drain.
        """
        running = self._named(hostname)
        running.deleted, running.disrupted = time.monotonic(), disrupted
        running.popen.send_signal(signal.SIGTERM)

    def step(self) -> None:
        """What Kubernetes does in a moment."""
        for pod, running in list(self.running.items()):
            code = running.popen.poll()
            if code is not None:
                del self.running[pod]
                status = 128 - code if code < 0 else code
                self.ends.append((pod.hostname, status))
                self.controller.ended(pod, status, running.disrupted)
        wanted = self.controller.wanted
        for pod, running in self.running.items():
            if pod not in wanted and running.deleted is None:
                running.deleted = time.monotonic()
                running.popen.send_signal(signal.SIGTERM)
            grace = self._spec(pod)["terminationGracePeriodSeconds"]
            if running.deleted is not None and time.monotonic() > running.deleted + grace:
                running.popen.kill()
        there = {pod.hostname for pod in self.running}
        for pod in wanted:
            # podReplacementPolicy: Failed: the one before is gone first.
            if pod not in self.running and pod.hostname not in there:
                again = pod.hostname in self.logs
                at = self.due.setdefault(pod, time.monotonic() + _BACKOFF * again)
                if time.monotonic() >= at:
                    self._start(pod)
        time.sleep(0.05)

    def _spec(self, pod: Pod) -> Manifest:
        jobs = (
            [self.controller]
            if isinstance(self.controller, JobController)
            else self.controller.jobs.values()
        )
        spec: Any = next(job.spec for job in jobs if job.name == pod.job)
        return spec["template"]["spec"]

    def _start(self, pod: Pod) -> None:
        spec = self._spec(pod)
        (container,) = spec["containers"]
        assert spec["shareProcessNamespace"]  # so its command is not the first process
        host = self.free.pop(0)
        env = {name: value for name, value in os.environ.items() if not name.startswith("TF")}
        env |= {"HOSTNAME": pod.hostname, "JOB_COMPLETION_INDEX": str(pod.index)}
        env |= {each["name"]: each["value"] for each in container["env"]}
        logs = self.logs.setdefault(pod.hostname, [])
        log = self.folder / f"{pod.hostname}-{len(logs)}.log"
        logs.append(log)
        with open(log, "wb") as output:
            popen = subprocess.Popen(
                self.hosts.command(host, *container["command"]),
                env=env | {"TF_CPP_MIN_LOG_LEVEL": "3"},
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.running[pod] = _Running(popen, log, host)
        self._write_hosts()

    def _write_hosts(self) -> None:
        """The Service: the names of the pods that there are, in the file that all hosts share."""
        lines = ["127.0.0.1 localhost"]
        for pod, running in self.running.items():
            lines.append(f"{self.hosts.addresses[running.host]} {pod.hostname}.{self.service}")
        self.hosts_file.write_text("\n".join(lines) + "\n")  # the same file, not another one

    def _named(self, hostname: str) -> _Running:
        return next(each for pod, each in self.running.items() if pod.hostname == hostname)

    def told(self, what: str) -> str:
        """What has happened, for a person."""
        logs = {name: self.output(name)[-2500:] for name in self.logs}
        parts = [f"--- {name}\n{log}" for name, log in logs.items()]
        return "\n".join([f"{what}; ends: {self.ends}", *parts])


@contextlib.contextmanager
def played(documents: list[Manifest], folder: Path, count: int) -> Iterator[Pods]:
    """Play the job of these manifests, on so many hosts: each new pod takes another one."""
    controller = controller_of(documents)
    with namespaces.hosts(count) as hosts, contextlib.ExitStack() as stack:
        shared = folder / "hosts"
        shared.write_text("127.0.0.1 localhost\n")
        for name in hosts.names:
            at = Path("/etc/netns", name)
            at.mkdir(parents=True)
            stack.callback(shutil.rmtree, at)
            (at / "hosts").symlink_to(shared)
        pods = Pods(controller, controller.name, folder, hosts, shared, free=list(range(count)))
        try:
            yield pods
        finally:
            for running in pods.running.values():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(running.popen.pid, signal.SIGKILL)
                running.popen.wait()
