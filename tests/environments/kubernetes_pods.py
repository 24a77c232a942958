"""Pods that are played: a process each, on a host of its own, with the names Kubernetes gives."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import namespaces
from kubernetes_controllers import JobController, JobSetController, Manifest, Pod
from namespaces import Hosts
from task_programs import LEFT_OUT


def controller_of(documents: list[Manifest]) -> JobController | JobSetController:
    """The controller of the job among these manifests."""
    (job,) = (each for each in documents if each["kind"] in ("Job", "JobSet"))
    kind = JobController if job["kind"] == "Job" else JobSetController
    return kind(job["metadata"]["name"], job["spec"])


@dataclass
class _Running:
    popen: subprocess.Popen[bytes]
    host: int
    grace_ends: float | None = None  # None: it is not deleted


class Pods:
    """The pods of one job; each new pod takes another host.

    Attributes:
        ends: the pods that have ended, with their statuses.
        logs: the files with the output of the pods of each name.
    """

    def __init__(
        self, controller: JobController | JobSetController, folder: Path, hosts: Hosts
    ) -> None:
        self.controller, self.hosts, self._folder = controller, hosts, folder
        self.ends: list[tuple[str, int]] = []
        self.logs: dict[str, list[Path]] = {}
        self._running: dict[Pod, _Running] = {}
        self._free = list(range(len(hosts.names)))

    def output(self, hostname: str) -> str:
        """What the pods of this name have written, all of them."""
        return "".join(log.read_text(errors="replace") for log in self.logs.get(hostname, ()))

    def until(self, hostname: str, text: str) -> None:
        """Go on until a pod has written this."""
        deadline = time.monotonic() + 90
        while text not in self.output(hostname):
            goes_on = time.monotonic() < deadline and not self.controller.state
            assert goes_on, self.describe(f"{hostname}: no {text!r}")
            self._step()

    def until_ended(self) -> str:
        """Go on until the job has ended, and its pods are gone; its state."""
        deadline = time.monotonic() + 150
        while not self.controller.state or self._running:
            assert time.monotonic() < deadline, self.describe("the job did not end")
            self._step()
        return self.controller.state

    def kill(self, hostname: str) -> None:
        """As if its container had used too much memory."""
        self._running[self._named(hostname)].popen.kill()

    def delete(self, hostname: str) -> None:
        """As `kubectl delete pod` does: SIGTERM, and SIGKILL when its grace is over."""
        self._delete(self._named(hostname))

    def describe(self, what: str) -> str:
        """What has happened, for a person."""
        logs = (f"--- {name}\n{self.output(name)[-2500:]}" for name in self.logs)
        return "\n".join([f"{what}; ends: {self.ends}", *logs])

    def end(self) -> None:
        for running in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.popen.pid, signal.SIGKILL)
            running.popen.wait()

    def _step(self) -> None:
        """What Kubernetes does in a moment."""
        for pod, running in list(self._running.items()):
            code = running.popen.poll()
            if code is not None:
                del self._running[pod]
                status = 128 - code if code < 0 else code
                self.ends.append((pod.hostname, status))
                self.controller.ended(pod, status)
        wanted = self.controller.wanted
        for pod, running in self._running.items():
            if running.grace_ends is None and pod not in wanted:
                self._delete(pod)
            elif running.grace_ends is not None and time.monotonic() > running.grace_ends:
                running.popen.kill()
        # podReplacementPolicy: Failed: the pod before is gone first.
        there = {pod.hostname for pod in self._running}
        for pod in wanted:
            if pod.hostname not in there:
                self._start(pod)
        time.sleep(0.05)

    def _delete(self, pod: Pod) -> None:
        grace = self.controller.spec_of(pod)["terminationGracePeriodSeconds"]
        self._running[pod].grace_ends = time.monotonic() + grace
        self._running[pod].popen.send_signal(signal.SIGTERM)

    def _start(self, pod: Pod) -> None:
        spec = self.controller.spec_of(pod)
        (container,) = spec["containers"]
        assert spec["shareProcessNamespace"]  # so its command is not the first process
        host = self._free.pop(0)
        env = {name: value for name, value in os.environ.items() if not name.startswith("TF")}
        env |= {"HOSTNAME": pod.hostname, "JOB_COMPLETION_INDEX": str(pod.index)}
        env |= {each["name"]: each["value"] for each in container["env"]}
        logs = self.logs.setdefault(pod.hostname, [])
        logs.append(self._folder / f"{pod.hostname}-{len(logs)}.log")
        with open(logs[-1], "wb") as output:
            popen = subprocess.Popen(
                self.hosts.command(host, *container["command"]),
                env=env | {"TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": LEFT_OUT},
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._running[pod] = _Running(popen, host)
        # The Service: the names of the pods, in the file that all hosts share.
        lines = ["127.0.0.1 localhost"]
        for each, running in self._running.items():
            address = self.hosts.addresses[running.host]
            lines.append(f"{address} {each.hostname}.{self.controller.name}")
        (self._folder / "hosts").write_text("\n".join(lines) + "\n")

    def _named(self, hostname: str) -> Pod:
        return next(pod for pod in self._running if pod.hostname == hostname)


@contextlib.contextmanager
def played(documents: list[Manifest], folder: Path, count: int) -> Iterator[Pods]:
    """Play the job of these manifests on this number of hosts."""
    with namespaces.hosts(count) as hosts, contextlib.ExitStack() as stack:
        (folder / "hosts").write_text("127.0.0.1 localhost\n")
        for name in hosts.names:
            at = Path("/etc/netns", name)
            at.mkdir(parents=True)
            stack.callback(shutil.rmtree, at)
            (at / "hosts").symlink_to(folder / "hosts")
        pods = Pods(controller_of(documents), folder, hosts)
        stack.callback(pods.end)
        yield pods
