"""What runs in the process of a task: the function, its result or its error, and the way out."""

from __future__ import annotations

import atexit
import faulthandler
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any, NoReturn

__all__ = ["SHOW_STACKS", "Supervisor", "TaskFailure", "enter", "leave", "run", "supervisor"]

SHOW_STACKS = signal.SIGUSR1

_supervisor: Supervisor | None = None


class TaskFailure(Exception):  # noqa: N818
    """A task failed; the message is complete, and is shown without a traceback."""


class Supervisor:
    """The process that has started this one, as this one sees it.

    Attributes:
        name: of this task.
        attempt: how often it was started again.
        folder: for files that are gone when all tasks have ended.
    """

    def __init__(self, name: str, attempt: int, folder: str, connection: Connection):
        self.name = name
        self.attempt = attempt
        self.folder = folder
        self._connection = connection

    def tell(self, kind: str, value: Any) -> None:
        """Send a value that pickle can handle."""
        self._connection.send((kind, value))

    def ask(self, kind: str, value: Any) -> Any:
        """Send a value and wait for the answer; an exception that comes back is raised."""
        self.tell(kind, value)
        answer = self._connection.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer


def supervisor() -> Supervisor | None:
    """The supervisor of this process, None where it is no task's."""
    return _supervisor


def run(
    name: str,
    attempt: int,
    connection: Connection,
    output: str,
    env: Mapping[str, str],
    stay: bool,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    """Run the function, tell the supervisor what came of it, and end this process.

    Args:
        output: file that standard output and error go to.
        stay: whether to wait with the end until the supervisor says so. In a cluster of workers
            alone the first one takes the others' connections with it.
    """
    global _supervisor
    enter(output, output, env)
    faulthandler.register(SHOW_STACKS, file=sys.stderr, all_threads=True)
    _supervisor = Supervisor(name, attempt, os.path.dirname(output), connection)
    status = 0
    try:
        _supervisor.tell("result", function(*args))
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if status:
            _supervisor.tell("error", f"SystemExit: {error.code}")
        else:
            _supervisor.tell("result", None)
    except TaskFailure as error:
        status, sys.last_value = 1, error
        _supervisor.tell("error", str(error))
    except BaseException as error:
        # As Python does where an exception ends a program, for who asks at exit.
        status, sys.last_value = 1, error
        trace = error.__traceback__
        while trace is not None and "/tfdist_ext/testing/" in trace.tb_frame.f_code.co_filename:
            trace = trace.tb_next
        _supervisor.tell("error", "".join(traceback.format_exception(error.with_traceback(trace))))
    if stay:
        connection.poll(None)
    leave(status)


def enter(output: str, errors: str, env: Mapping[str, str]) -> None:
    """Begin a process: a session of its own, files for what it writes, and its environment."""
    os.setsid()  # what it starts is ended with it
    for number, path in ((1, output), (2, errors)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, number)
        os.close(file)
    sys.stdout = os.fdopen(1, "w", buffering=1, errors="replace", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="replace", closefd=False)
    os.environ.clear()
    os.environ.update(env)


def leave(status: int) -> NoReturn:
    """End this process, as the end of a program does it."""
    atexit._run_exitfuncs()  # a coordinator tells its servers; multiprocessing calls none
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # TensorFlow's threads may wait for peers for ever
