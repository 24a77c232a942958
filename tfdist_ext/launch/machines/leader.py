"""Node 0 of a run on several machines: makes each plan, and decides for all."""

from __future__ import annotations

import contextlib
import io
import json
import queue
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from tfdist_ext.errors import LaunchError
from tfdist_ext.launch.machines.connection import LOST_AFTER, Link, Message
from tfdist_ext.launch.machines.layout import Layout
from tfdist_ext.launch.machines.rendezvous import Endpoint, Rendezvous
from tfdist_ext.launch.machines.tasks import MachinesTasks
from tfdist_ext.launch.plan import LaunchPlan, Machine, plan_tasks
from tfdist_ext.launch.ports import reserve_ports
from tfdist_ext.launch.restarting import RESULT, Limits, MachineLostError, run_with_restarts
from tfdist_ext.launch.restarts import RestartPolicy
from tfdist_ext.launch.shares import Share
from tfdist_ext.launch.stop_signals import StopSignals
from tfdist_ext.launch.task_sets import LocalTasks

__all__ = ["run_leader"]

_RETURN = 15.0  # seconds for a machine that was lost to come back, where the others are enough
_ANSWER = 20.0  # seconds for a node to say which ports are free
_USAGE_ERROR = 2


def run_leader(
    layout: Layout,
    command: Sequence[str],
    shares: Sequence[Share],
    ports: range | None,
    endpoint: Endpoint,
    policy: RestartPolicy,
    *,
    log_dir: Path,
    env: Mapping[str, str],
    limits: Limits,
    stop: StopSignals,
) -> int:
    """Run the tasks of all machines, as node 0; the exit status of the run, which all nodes have.

    Args:
        layout: which tasks run on which machine.
        command: of the tasks of this machine; the others have their own.
        shares: what each worker of this machine gets of it; empty: they share it.
        ports: those that the tasks of this machine may listen on; None: any.

    Raises:
        LaunchError: it cannot listen at the rendezvous, a machine does not come in time, or a
            program cannot be started.
    """
    run = _Leader(layout, tuple(command), shares, ports, endpoint, policy, stop, env)
    status, error = _USAGE_ERROR, ""
    try:
        status = run_with_restarts(
            run.planned, policy, log_dir=log_dir, env=env, limits=limits, stop=stop, machines=run
        )
    except LaunchError as wrong:
        error = str(wrong)
        raise
    finally:
        run.close(status, _result_in(log_dir), error)
    return status


def _result_in(log_dir: Path) -> Any:
    try:
        return json.loads((log_dir / RESULT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


class _Everywhere(io.TextIOBase):
    """Standard error of all machines."""

    def __init__(self) -> None:
        self.rendezvous: Rendezvous | None = None

    def write(self, text: str) -> int:
        sys.stderr.write(text)
        sys.stderr.flush()
        if self.rendezvous is not None and text:
            self.rendezvous.send({"report": text})
        return len(text)

    def fileno(self) -> int:
        raise OSError("it is none")


class _Leader:
    """The other machines as this one sees them; an `OtherMachines`."""

    def __init__(
        self,
        layout: Layout,
        command: tuple[str, ...],
        shares: Sequence[Share],
        ports: range | None,
        endpoint: Endpoint,
        policy: RestartPolicy,
        stop: StopSignals,
        env: Mapping[str, str],
    ) -> None:
        self._layout, self._command, self._shares = layout, command, shares
        self._ports = ports
        self._endpoint, self._policy, self._stop, self._env = endpoint, policy, stop, env
        self._everywhere = _Everywhere()
        self._reserved: queue.SimpleQueue[tuple[Link, Message]] = queue.SimpleQueue()
        self._tasks: MachinesTasks | None = None
        self._workers: tuple[int, ...] = ()
        self._starts = 0
        card = layout.described
        self._rendezvous = Rendezvous(endpoint, layout.nodes, card, self._say)
        self._rendezvous.heard = self._hear
        self._rendezvous.lost = self._lose
        self._everywhere.rendezvous = self._rendezvous

    @property
    def report(self) -> TextIO:
        return self._everywhere  # type: ignore[return-value]  # as far as a Printer uses it

    def _say(self, text: str) -> None:
        self._everywhere.write(f"tfdist: {text}\n")

    def _hear(self, link: Link, message: Message) -> None:
        if "signalled" in message:
            self._stop.came(int(message["signalled"]))
        elif "reserved" in message:
            self._reserved.put((link, message))
        elif self._tasks is not None:
            self._tasks.hear(link, message)

    def _lose(self, link: Link, why: str) -> None:
        self._say(f"{link} is lost: {why}")
        if self._tasks is not None:
            self._tasks.lose(link, why)

    def all_there(self) -> bool:
        return not self._rendezvous.missing(range(self._layout.nodes))

    def available(self, workers: tuple[int, ...]) -> tuple[int, ...]:
        first, self._starts = not self._starts, self._starts + 1
        needed = set(self._layout.nodes_of(workers).get("worker", ())) | self._layout.needed
        wait = self._endpoint.wait
        missing = self._wait_for(needed, wait if first else min(wait, _RETURN))
        left = self._layout.workers_without(missing, workers)
        without = not set(missing) & self._layout.needed
        enough = without and len(left) >= self._policy.min_workers
        if missing and not first and enough:
            names = ", ".join(map(str, missing))
            self._say(f"node {names} does not come back: going on with {len(left)} workers")
            return left
        if missing and not first:
            missing = self._wait_for(needed, max(0.0, wait - _RETURN))
        if missing and self._stop.first is None:
            names = ", ".join(map(str, missing))
            raise LaunchError(
                f"all {self._layout.nodes} machines must come to {self._endpoint} within {wait:g} s"
                f" (--rendezvous-timeout), got no node {names}; start tfdist there with its"
                " --node-rank, or check that it can reach this address"
            )
        return workers

    def _wait_for(self, nodes: set[int], seconds: float) -> list[int]:
        stopped = lambda: self._stop.first is not None  # noqa: E731
        return self._rendezvous.wait_for(nodes, seconds, stopped)

    @contextlib.contextmanager
    def planned(self, workers: tuple[int, ...], log_dir: Path) -> Iterator[LaunchPlan]:
        """The plan of a start, with ports that are free on each machine."""
        self._workers = workers
        nodes = self._layout.nodes_of(workers)
        where = [node for tasks in nodes.values() for node in tasks]
        theirs = self._reserve({node: where.count(node) for node in set(where) if node})
        shares = [self._share(worker) for worker in workers] if self._shares else ()
        with reserve_ports(where.count(0), among=self._ports) as ports:
            machines = {0: Machine(self._endpoint.host, ports), **theirs}
            yield plan_tasks(
                self._command, nodes, machines, shares=shares, log_dir=log_dir, env=self._env
            )

    def _share(self, worker: int) -> Share:
        node, place = divmod(worker, self._layout.workers_per_node)
        return Share() if node else self._shares[place]

    def _reserve(self, counts: Mapping[int, int]) -> dict[int, Machine]:
        """Free ports on other machines.

        Raises:
            MachineLostError: one of them is lost.
            LaunchError: one has no free ports.
        """
        links = self._rendezvous.links
        asked = {node: links[node] for node in counts if node in links}
        for node, link in asked.items():
            link.send({"reserve": counts[node], "start": self._starts})
        machines: dict[int, Machine] = {}
        deadline = time.monotonic() + _ANSWER
        while len(machines) < len(counts):
            late = [node for node in counts if node not in machines]
            lost = [node for node in late if node not in asked or asked[node].is_lost]
            if lost or time.monotonic() >= deadline:
                names = ", ".join(map(str, lost or late))
                raise MachineLostError(f"every machine must say what is free, node {names} did not")
            with contextlib.suppress(queue.Empty):
                link, message = self._reserved.get(timeout=0.1)
                if message.get("start") != self._starts or asked.get(link.node) is not link:
                    continue
                if message.get("failed"):
                    raise LaunchError(f"{link}: {message['failed']}")
                ports = [int(port) for port in message["reserved"]]
                machines[link.node] = Machine(str(message["host"]), ports)
        return machines

    def with_others(self, local: LocalTasks, *, start: int) -> MachinesTasks:
        per_node = self._layout.workers_per_node
        places = {f"worker:{n}": worker % per_node for n, worker in enumerate(self._workers)}
        self._tasks = MachinesTasks(local, self._rendezvous.links, places, start)
        return self._tasks

    def close(self, status: int, result: Any, error: str) -> None:
        """Tell the others that the run is over, and how."""
        self._rendezvous.lost = lambda link, why: None
        self._rendezvous.send({"done": status, "result": result, "error": error})
        # They close: what would be sent to them now could undo what was.
        self._rendezvous.wait_until_empty(LOST_AFTER)
        self._rendezvous.close()
