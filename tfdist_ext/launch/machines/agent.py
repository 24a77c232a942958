"""A node other than 0: starts the tasks that node 0 plans for this machine, and tells of them."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import queue
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tfdist_ext.errors import LaunchError
from tfdist_ext.launch.command_line import STARTS_AGAIN
from tfdist_ext.launch.exit_codes import GRACE, PREEMPTION_SIGNAL, RESTART
from tfdist_ext.launch.machines.connection import Link, Message
from tfdist_ext.launch.machines.rendezvous import Endpoint, join
from tfdist_ext.launch.output import OutputPump, Printer, wants_color
from tfdist_ext.launch.plan import DATA_SERVICE, SERVICE_MODULE, TaskPlan
from tfdist_ext.launch.ports import reserve_ports
from tfdist_ext.launch.restarting import RESTARTS, Limits, folder_of, write_result
from tfdist_ext.launch.shares import Share
from tfdist_ext.launch.stop_signals import StopSignals
from tfdist_ext.launch.task_sets import LocalTasks, RunningTask

__all__ = ["Node", "run_node"]

_FROM_NODE_0 = ("TF_CONFIG", DATA_SERVICE)  # in the environment of tasks
_GRACE_OF_LOSS = 1.0  # seconds from SIGTERM to SIGKILL where node 0 is lost


@dataclasses.dataclass(frozen=True)
class Node:
    """This machine in a run on several.

    Attributes:
        number: of the node.
        host: by which the others reach it; "": the address that it connects to node 0 from.
        command: of each of its tasks.
        shares: what each of its workers gets of the machine; empty: they share it.
        ports: those that its tasks may listen on; None: any.
        log_dir: as in `run_with_restarts`.
        env: what the tasks' environment starts from.
        restarts: whether the run may start again, so that a break of the connection is waited for.
        speaks: whether the report of node 0 is shown here, too.
    """

    number: int
    host: str
    command: tuple[str, ...]
    shares: Sequence[Share]
    ports: range | None
    log_dir: Path
    env: Mapping[str, str]
    restarts: bool
    speaks: bool = True


def run_node(
    node: Node, endpoint: Endpoint, card: Mapping[str, Any], limits: Limits, stop: StopSignals
) -> int:
    """Work for node 0 until it says that the run is over; the exit status of the run.

    Where the connection breaks, the tasks of this machine are ended, and it is made again.

    Raises:
        LaunchError: node 0 is not there in time, will not have this node, or cannot start.
    """

    def say(text: str) -> None:
        print(f"tfdist: {text}", file=sys.stderr, flush=True)

    with stop.handled():
        while True:
            joined = join(
                endpoint,
                node.number,
                node.host,
                card,
                say=say,
                stopped=lambda: stop.first is not None,
            )
            if joined is None:
                return stop.status
            link, host = joined
            if node.speaks:
                say(f"node {node.number} ({host}) has joined node 0 at {endpoint}")
            with contextlib.closing(_Work(node, link, host, limits, stop)) as work:
                status = work.until_done()
            if status is not None:
                return status
            say(f"node 0 ({endpoint}) is lost: {work.lost}; the tasks of this machine have ended")
            if stop.first is not None:
                return stop.status
            if not node.restarts:
                return RESTART


class _Work:
    """What this node does for node 0 over one connection. Events come in a queue; one thread acts.

    Attributes:
        lost: why the connection has broken.
    """

    def __init__(
        self, node: Node, link: Link, host: str, limits: Limits, stop: StopSignals
    ) -> None:
        self._node, self._link, self._host = node, link, host
        self._limits, self._stop = limits, stop
        self._events: queue.SimpleQueue[Message | signal.Signals | tuple[RunningTask, int]] = (
            queue.SimpleQueue()
        )
        self._report = Printer(sys.stderr)
        self._tasks: LocalTasks | None = None
        self._ports = contextlib.ExitStack()
        self.lost = ""

    def until_done(self) -> int | None:
        """The status of the run, once it is over; None where the connection breaks before."""
        self._link.received = self._events.put
        self._link.lost = lambda why: self._events.put({"lost": why})
        self._stop.tell = self._events.put
        self._link.start()
        if self._stop.first is not None:  # while it connected
            self._events.put(self._stop.first)
        while True:
            event = self._events.get()
            match event:
                case signal.Signals():
                    self._link.send({"signalled": int(event)})
                case (task, int(code)):
                    self._tell_end(task, code)
                case {"lost": str(why)}:
                    self.lost = why
                    return None
                case {"reserve": int(count), "start": start}:
                    self._reserve(count, start)
                case {"run": {"tasks": list(tasks), "names": list(names), "start": int(start)}}:
                    self._start(tasks, names, start)
                case {"again": str(name)} if self._tasks is not None:
                    for task in self._tasks.tasks:
                        if task.name == name:
                            self._tasks.start_again(task)
                case {"signal": int(number)} if self._tasks is not None:
                    self._tasks.signal_all(number)
                case {"end": _}:
                    self._end()
                    self._link.send({"over": True})
                case {"report": str(text)}:
                    if self._node.speaks:
                        self._report.write(text)
                case {"done": int(status), "result": result, "error": str(error)}:
                    if error:
                        raise LaunchError(error)
                    if isinstance(result, dict):
                        write_result(self._node.log_dir, result)
                    return status

    def _reserve(self, count: int, start: Any) -> None:
        self._ports.close()
        among = self._node.ports
        try:
            ports = list(self._ports.enter_context(reserve_ports(count, among=among)))
        except LaunchError as error:
            self._link.send({"reserved": [], "start": start, "failed": str(error)})
            return
        self._link.send({"reserved": ports, "start": start, "host": self._host})

    def _start(self, tasks: list[Message], names: list[str], start: int) -> None:
        stream = sys.stdout
        env = {
            **self._node.env,
            RESTARTS: str(start),
            GRACE: f"{self._limits.grace:g}",
            PREEMPTION_SIGNAL: self._stop.preemption.name,
            **({STARTS_AGAIN: "1"} if self._node.restarts else {}),
        }
        color = wants_color(stream, self._node.env)
        pump = OutputPump(
            Printer(stream), names, color=color, report=self._report, raw=self._limits.raw
        )
        limits = self._limits
        self._tasks = LocalTasks(env, pump, limits.stall_timeout, say_started=limits.say_started)
        folder = folder_of(self._node.log_dir, start)
        try:
            plans = [self._plan(told, folder) for told in tasks]
            self._tasks.start(plans, lambda task, code: self._events.put((task, code)))
        except LaunchError as error:
            self._end()
            self._link.send({"failed": str(error)})
        else:
            self._link.send({"started": start})

    def _plan(self, told: Message, folder: Path) -> TaskPlan:
        """The plan of a task, of what node 0 says of it."""
        name, service, place = str(told["name"]), told["service"], told["place"]
        argv, share = self._node.command, Share()
        env = {key: str(told["env"][key]) for key in _FROM_NODE_0 if key in told["env"]}
        if service is not None:
            argv = (sys.executable, "-m", SERVICE_MODULE, *map(str, service))
            env = {"CUDA_VISIBLE_DEVICES": "-1"}
        elif place is not None and self._node.shares:
            share = self._node.shares[int(place)]
        log_file = folder / f"{name.replace(':', '-')}.log"
        return TaskPlan(name, argv, {**env, **share.env}, log_file, share.cores)

    def _tell_end(self, task: RunningTask, code: int) -> None:
        task.returncode = code
        if self._tasks is None:
            return
        self._link.send(
            {
                "ended": {
                    "task": task.name,
                    "code": code,
                    "blame": self._tasks.blame(task.name) if code else None,
                    "raised": self._tasks.raised(task.name) if code else "",
                    "last_lines": self._tasks.last_lines(task.name),
                    "killed_because": task.killed_because,
                    "log": os.path.abspath(task.log) if task.log else "",
                }
            }
        )

    def _end(self) -> None:
        if self._tasks is not None:
            tasks, self._tasks = self._tasks, None
            tasks.end()
            tasks.close()
        self._ports.close()

    def close(self) -> None:
        """End what runs, and the connection."""
        if self._tasks is not None:
            self._tasks.signal_all(signal.SIGTERM)
            deadline = time.monotonic() + _GRACE_OF_LOSS
            while self._tasks.leftovers() and time.monotonic() < deadline:
                time.sleep(0.05)
        self._end()
        self._stop.tell = None
        self._link.close()
