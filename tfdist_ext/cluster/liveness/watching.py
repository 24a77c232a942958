"""Who has died, and who is frozen: stopped, swapped out, or on a machine that is paused.

TensorFlow waits for the answers of a frozen task without a limit. But a gRPC server answers from
threads of its own, however busy its process is. So a task that was there and does not answer any
more is frozen, and one whose port refuses connections is gone.

The coordinator of parameter servers is watched over by a process of its own, because TensorFlow
holds Python's lock while it waits for a frozen worker, and no Python thread of the coordinator
runs: measured in `fit` with a worker that was stopped.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping

from tfdist_ext.cluster.liveness.reports import WaitReports, say
from tfdist_ext.cluster.liveness.wire import READY, SILENT, STARTED, Connection

# The states of a task.
EXPECTED, ALIVE, GONE, FROZEN = "expected", "alive", "gone", "frozen"

_ANSWER = 5.0  # seconds for an answer
_ANSWERS = 5  # at least so many in a row must be missed before a task counts as frozen
_REFUSED = 4  # looks in a row after which a task is gone; one may be lost on a busy network
_TO_END = 10.0  # seconds between SIGTERM and SIGKILL


class TaskWatch:
    """The state of one task, by its address.

    Only questions that this process has asked count: while it was frozen itself, none was missed.

    Args:
        frozen_after: seconds without an answer.

    Attributes:
        state: EXPECTED until it was seen, ALIVE, GONE or FROZEN.
        silent: seconds without an answer.
    """

    def __init__(self, task: str, address: str, frozen_after: float) -> None:
        self.state = EXPECTED
        self.silent = 0.0
        self._name = f"{task} ({address})"
        self._frozen_after = frozen_after
        self._answer = min(_ANSWER, frozen_after / _ANSWERS)
        self._connection = Connection(address)
        self._refused = 0
        self._reports = WaitReports()

    def __str__(self) -> str:
        return self._name

    def look(self) -> bool:
        """Whether the task answers now; sets `state`."""
        found, _ = self._connection.ask({}, self._answer)
        answers = found in (READY, STARTED)
        if answers:
            self.state, self.silent, self._refused = ALIVE, 0.0, 0
        elif self.state != EXPECTED:
            is_silent = found == SILENT
            self.silent = self.silent + self._answer if is_silent else 0.0
            self._refused = 0 if is_silent else self._refused + 1
            if self.silent >= self._frozen_after:
                self.state = FROZEN
            elif self._refused >= _REFUSED:
                self.state = GONE
        return answers

    def report_wait(self, me: str, source: str) -> None:
        """Report on stderr, now and then, that the task has not come yet."""
        if self.state == EXPECTED:
            self._reports.report(me, self._name, source)

    @property
    def failure(self) -> str:
        """A sentence on a frozen task; "" in another state."""
        if self.state != FROZEN:
            return ""
        return (
            f"{self._name} has not answered for {self.silent:.0f} s: its process is stopped, or"
            " its machine is paused or overloaded."
        )


class Watcher:
    """A process that ends this one, and says why, when one of the tasks is frozen.

    It ends with this object, or with this process. It sends SIGTERM, and SIGKILL if that has not
    helped.

    Args:
        me: this task, for the message.
        tasks: task -> "host:port".
        frozen_after: seconds without an answer.
    """

    def __init__(self, me: str, tasks: Mapping[str, str], frozen_after: float):
        program = (
            f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import run_watcher;"
            f" run_watcher({me!r}, {os.getpid()}, {dict(tasks)!r}, {frozen_after})"
        )
        process = subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
        )
        # Not at the end of this process, which may hang there.
        weakref.finalize(self, _stop, process).atexit = False


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()  # which closes its pipe, too


def run_watcher(me: str, parent: int, tasks: Mapping[str, str], frozen_after: float) -> None:
    """The program of the process of a `Watcher`, with a thread for each task."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the training

    def watch(task: TaskWatch) -> None:
        while task.state != FROZEN:
            answers = task.look()
            # After a missed answer the next question follows at once: this one has waited already.
            time.sleep(0.0 if task.silent else frozen_after / 10 if answers else 1.0)
        say(f"{me}: {task.failure} The job ends.")
        for number in (signal.SIGTERM, signal.SIGKILL):
            if os.getppid() == parent:
                os.kill(parent, number)
            time.sleep(_TO_END)

    for task, address in tasks.items():
        watched = TaskWatch(task, address, frozen_after)
        threading.Thread(target=watch, args=(watched,), daemon=True).start()
    sys.stdin.read()  # to its end, which is that of the other process
    os._exit(0)  # its threads may wait for an answer


def exit_within(seconds: float) -> None:
    """End this process with status 1, unless it has ended by itself by then.

    Neither TensorFlow nor the end of the interpreter can hold up this timer.
    """
    # The one timer of Python's that needs neither its lock nor a thread of its own.
    faulthandler.dump_traceback_later(seconds, exit=True, file=_NOWHERE)


_NOWHERE = os.open(os.devnull, os.O_WRONLY)  # as long as the process
