"""The code in the process of a task: its beginning, the function and its report, its exit."""

from __future__ import annotations

import atexit
import faulthandler
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NoReturn

__all__ = [
    "SHOW_STACKS",
    "Supervisor",
    "TaskFailure",
    "begin_process",
    "exit_process",
    "run_and_report",
    "supervisor",
]

SHOW_STACKS = signal.SIGUSR1

_supervisor: Supervisor | None = None


class TaskFailure(Exception):  # noqa: N818
    """A task failed; the message is complete, and is shown without a traceback."""


@dataclass(frozen=True)
class Supervisor:
    """The connection of a task to the process that supervises it.

    Attributes:
        name: name of this task.
        attempt: how often it was restarted.
        folder: folder for files, deleted when all tasks have ended.
        connection: messages go through it.
    """

    name: str
    attempt: int
    folder: str
    connection: Connection

    def send(self, kind: str, value: Any) -> None:
        """Send a value that pickle can handle."""
        self.connection.send((kind, value))

    def request(self, kind: str, value: Any) -> Any:
        """Send a value and wait for the answer; an exception that comes back is raised."""
        self.send(kind, value)
        answer = self.connection.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer


def supervisor() -> Supervisor | None:
    """The supervisor of this process, None if this process is no task."""
    return _supervisor


def run_and_report(
    name: str,
    attempt: int,
    connection: Connection,
    output: str,
    env: Mapping[str, str],
    wait_for_release: bool,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    """Run the function, send its result or error to the supervisor, and exit.

    Args:
        output: file for standard output and error.
        wait_for_release: whether to exit only when the supervisor says so. In a cluster without
            parameter servers the exit of the first worker breaks the connections of the others.
    """
    global _supervisor
    begin_process(output, output, env)
    faulthandler.register(SHOW_STACKS, file=sys.stderr, all_threads=True)
    _supervisor = Supervisor(name, attempt, os.path.dirname(output), connection)
    status = 0
    try:
        _supervisor.send("result", function(*args))
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if status:
            _supervisor.send("error", f"SystemExit: {error.code}")
        else:
            _supervisor.send("result", None)
    except TaskFailure as error:
        status, sys.last_value = 1, error
        _supervisor.send("error", str(error))
    except BaseException as error:
        # As Python does when an exception ends a program: exit functions may read it.
        status, sys.last_value = 1, error
        trace = error.__traceback__
        while trace is not None and "/tfdist_ext/testing/" in trace.tb_frame.f_code.co_filename:
            trace = trace.tb_next
        _supervisor.send("error", "".join(traceback.format_exception(error.with_traceback(trace))))
    if wait_for_release:
        connection.poll(None)
    exit_process(status)


def begin_process(output: str, errors: str, env: Mapping[str, str]) -> None:
    """Set up a process: a new session, files for its output, and its environment."""
    os.setsid()  # its children are killed with it
    for number, path in ((1, output), (2, errors)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, number)
        os.close(file)
    sys.stdout = os.fdopen(1, "w", buffering=1, errors="replace", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="replace", closefd=False)
    os.environ.clear()
    os.environ.update(env)


def exit_process(status: int) -> NoReturn:
    """Exit as a program does: with its exit functions, but without waiting for threads."""
    atexit._run_exitfuncs()  # a coordinator tells its servers; multiprocessing calls none
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # TensorFlow's threads may wait for peers forever
