"""Why this task fails: kept for its exit functions, and written for its launcher.

A launcher names a file in the environment of each task. The task writes there what it raised and
which other task it blames. A task that a signal or C++ ends at once writes nothing.

Exit functions read `sys.last_value`, where Python keeps an uncaught exception. Python keeps no
SystemExit, and nothing but `sys.exit` itself can notice one. So `watch` replaces `sys.exit`. A
`raise SystemExit(1)` in a script is not noticed, and a `sys.exit(1)` that the script catches is,
unless `sys.exit(0)` follows.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import threading
import time
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from tfdist_ext.errors import PeerError, StrategyError

ERROR_FILE = "TFDIST_ERROR_FILE"  # in the environment of a task: the file of its failure
# The words of TensorFlow's coordination service about a task that is gone or frozen.
_REPORTED = re.compile(r"Error reported from /job:(\w+)/task:(\d+)")


@dataclass(frozen=True)
class Failure:
    """Why a task failed. As text: the type and the first line of the message.

    Attributes:
        type: the type of the exception; "SystemExit" for `sys.exit`.
        message: the message of the exception.
        peer: the task that is blamed, as "worker:1"; "" if no other task is.
        traceback: the traceback as Python prints it; "" for `sys.exit`.
        time: seconds since 1970.
    """

    type: str
    message: str
    peer: str = ""
    traceback: str = ""
    time: float = field(default_factory=time.time)

    def __str__(self) -> str:
        first_line = self.message.strip().partition("\n")[0]
        return f"{self.type}: {first_line}"

    def write(self, file: str | os.PathLike[str]) -> None:
        """Write the failure for the launcher. A disk that is full is no other failure."""
        with contextlib.suppress(OSError):
            Path(file).write_text(json.dumps(asdict(self)), encoding="utf-8")


def failure_in(file: Path) -> Failure | None:
    """The failure that a task has written; None without one."""
    try:
        return Failure(**json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):  # the task was killed while it wrote
        return None


class _Task:
    """What `watch` has set up in this process.

    Attributes:
        pid: the process; its forked children record nothing.
        error_file: the file for the launcher; "" without a launcher.
        preempted: whether a signal has ended the training.
    """

    pid = 0
    error_file = ""
    preempted = False


def error_file() -> str:
    """The file for the failure of this process; "" without a launcher."""
    return _Task.error_file


def preemption(status: int) -> SystemExit:
    """Returns the exit of a training that a signal ended. Exit functions see a failure."""
    _Task.preempted = True
    return SystemExit(status)


def has_failed() -> bool:
    """Whether this process, which exits, has failed or was preempted."""
    return _Task.preempted or getattr(sys, "last_value", None) is not None


def watch() -> None:
    """Record uncaught exceptions and `sys.exit` with a failure from now on."""
    # Not for the programs that this process starts.
    _Task.error_file = os.environ.pop(ERROR_FILE, _Task.error_file)
    if _Task.pid == os.getpid():
        return
    _Task.pid = os.getpid()
    sys.exit = _exit
    show = sys.excepthook

    def record_and_show(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        record(error)
        show(kind, error, trace)

    sys.excepthook = record_and_show


def record(error: BaseException) -> Failure:
    """Keep an exception as the cause of the end of this process, and write it for the launcher."""
    sys.last_value = error  # as Python does
    lines = [] if isinstance(error, SystemExit) else traceback.format_exception(error)
    failure = Failure(type(error).__name__, str(error), _blamed_peer(error), "".join(lines))
    if _Task.error_file and _Task.pid == os.getpid():
        failure.write(_Task.error_file)
    return failure


def _exit(status: object = None, /) -> NoReturn:
    """`sys.exit`, which records a failure of the main thread."""
    end = SystemExit(status)
    end.__context__ = sys.exc_info()[1]  # as `raise` does
    is_number = status is None or isinstance(status, int)
    if threading.current_thread() is threading.main_thread():
        if is_number and not status:
            sys.last_value, _Task.preempted = None, False
        else:  # in an `except` clause, a number says less than the exception
            record(end.__context__ if is_number and end.__context__ else end)
    raise end


def _blamed_peer(error: BaseException | None) -> str:
    """The task that an exception, or one of its causes, blames."""
    while error is not None:
        if isinstance(error, PeerError):
            return error.task
        if isinstance(error, StrategyError):
            return error.missing.partition(" ")[0]
        if match := _REPORTED.search(str(error)):
            return f"{match[1]}:{match[2]}"
        error = error.__cause__ or error.__context__
    return ""
