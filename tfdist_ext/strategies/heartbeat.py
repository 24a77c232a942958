"""Tasks whose process is frozen: stopped, swapped out, or on a machine that is paused.

The kernel still accepts connections for such a process, so a connection alone says nothing, and
TensorFlow waits for its answers without a limit. But a gRPC server greets each connection (the
SETTINGS frame of HTTP/2), from threads of its own, however busy its process is. This file asks for
that greeting.

Seen from the coordinator, a process of its own asks: while a server is frozen, TensorFlow may hold
Python's lock in a call that does not return (where it lets go of a remote tensor), and no thread
runs. That process runs this very file, which therefore needs Python's standard library alone.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

__all__ = ["PREFACE", "Heartbeat", "Silence", "Watcher", "exit_within", "greets"]

BEAT_EVERY = 5.0  # seconds; also how long an answer may take
_TO_END = 10.0  # seconds between SIGTERM and SIGKILL
BEATS = 5  # at least so many in a row must be missed: a loaded machine misses one, not five

# What a client of HTTP/2, and so of gRPC, says first: the preface and empty SETTINGS (RFC 9113,
# section 3.4).
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"


def greets(address: str, timeout: float) -> bool | None:
    """Whether the gRPC server at "host:port" answers within `timeout` seconds.

    None: there is no process. It has ended, or has not started yet; TensorFlow knows that.
    """
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + timeout
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout) as connection:
            connection.settimeout(max(0.1, deadline - time.monotonic()))
            connection.sendall(PREFACE)
            return bool(connection.recv(1)) or None
    except TimeoutError:
        return False
    except (OSError, ValueError, OverflowError):
        return None


class Silence:
    """How long a task that was there has not answered; a number of missed beats, and a time.

    Only beats that this process has sent count: while it was frozen itself, none was missed.

    Args:
        limit: seconds without an answer after which the task counts as frozen.

    Attributes:
        beat_every: seconds between two beats.
        seconds: without an answer, so far.
    """

    def __init__(self, address: str, limit: float):
        self._address = address
        self._limit = limit
        self.beat_every = min(BEAT_EVERY, limit / BEATS)
        self._seen = False
        self.seconds = 0.0

    def beat(self) -> bool:
        """Ask once; whether the task is frozen. Takes at most `beat_every` seconds."""
        answer = greets(self._address, self.beat_every)
        if answer is False and self._seen:
            self.seconds += self.beat_every
        else:
            self._seen |= bool(answer)
            self.seconds = 0.0
        return self.seconds >= self._limit


class Heartbeat:
    """Threads that ask the given tasks for a sign of life, one for each, until one is frozen.

    Args:
        tasks: task -> "host:port".
        limit: seconds, as in `Silence`.
        frozen: called once, in one of the threads, with `failure`.

    Attributes:
        failure: a sentence that names the task that is frozen; "" while none is.
    """

    def __init__(self, tasks: Mapping[str, str], limit: float, frozen: Callable[[str], None]):
        self._frozen = frozen
        self._limit = limit
        self._lock = threading.Lock()
        self.failure = ""
        for task, address in tasks.items():
            threading.Thread(
                target=self._watch, args=(task, address), daemon=True, name=f"heartbeat {task}"
            ).start()

    def _watch(self, task: str, address: str) -> None:
        silence = Silence(address, self._limit)
        while not silence.beat():
            # After a missed beat the next one follows at once: it has waited already.
            time.sleep(0.0 if silence.seconds else silence.beat_every)
        with self._lock:
            if self.failure:
                return
            self.failure = (
                f"{task} ({address}) has not answered for {silence.seconds:.0f} s: its process is"
                " stopped, or its machine is paused or overloaded."
            )
        self._frozen(self.failure)


class Watcher:
    """A process that ends this one, and says why on stderr, when one of the tasks is frozen.

    It ends with this object, or with this process. It sends SIGTERM, and SIGKILL when that has not
    helped. It also ends this process where that does not do what it is expected to.

    Args:
        me: this task, for the message.
        tasks, limit: as in `Heartbeat`.
    """

    def __init__(self, me: str, tasks: Mapping[str, str], limit: float):
        self._pipe: IO[bytes] | None = None
        # Isolated and without site: it starts in some 20 ms, whatever is installed.
        command = [sys.executable, "-I", "-S", __file__]
        try:
            process = subprocess.Popen(
                command, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
            )
        except (OSError, TypeError):  # no Python to start: then there is no watchdog
            return
        self._pipe = process.stdin
        # Not at the end of this process, which may hang there.
        weakref.finalize(self, _stop, process).atexit = False
        self._tell([me, os.getpid(), dict(tasks), limit])

    def checkpoints_in(self, folder: str) -> None:
        """Name the latest checkpoint in this folder in the message; "" for none."""
        self._tell(folder)

    def expect(self, seconds: float, else_: str) -> None:
        """End this process, showing its stacks, unless this is called again in time; 0: never.

        Args:
            else_: what has happened then.
        """
        if not faulthandler.is_enabled():
            faulthandler.enable(file=2)  # shows them at a SIGABRT, whoever holds Python's lock
        self._tell({"seconds": seconds, "else": else_})

    def _tell(self, value: Any) -> None:
        if self._pipe is not None:
            with contextlib.suppress(OSError):
                self._pipe.write(f"{json.dumps(value)}\n".encode())


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()  # which closes its pipe, too


def _main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the training
    me, parent, tasks, limit = json.loads(sys.stdin.readline())
    folder = ""

    def end(why: str, ask: signal.Signals) -> None:
        print(f"{why} The job ends. {_advice(folder)}", file=sys.stderr, flush=True)
        for number in (ask, signal.SIGKILL):
            if os.getppid() == parent:
                os.kill(parent, number)
            time.sleep(_TO_END)

    left, failure = 0.0, ""

    def look() -> None:
        nonlocal left
        while not 0 < left <= 1.0:  # counted, as this process may have been stopped itself
            left = max(0.0, left - 1.0)
            time.sleep(1.0)
        end(f"tfdist: {failure}: it does not even answer itself.", signal.SIGABRT)

    Heartbeat(tasks, limit, lambda failure: end(f"{me}: {failure}", signal.SIGTERM))
    threading.Thread(target=look, daemon=True).start()
    for line in sys.stdin:  # to its end, which is that of the other process
        match json.loads(line):
            case {"seconds": seconds, "else": text}:
                left, failure = seconds, text
            case text:
                folder = text


def _advice(folder: str) -> str:
    if not folder:
        return ""
    files = sorted(Path(folder).glob("epoch-*.safetensors"), key=lambda file: file.stat().st_mtime)
    if not files:
        return f"There is no checkpoint in {folder} yet."
    return f"The last checkpoint is {files[-1]}: start the job again to resume from it."


def exit_within(seconds: float) -> None:
    """End this process with status 1, unless it has ended by itself by then.

    Nothing that hangs can keep it: neither TensorFlow nor the interpreter's own end.
    """
    # The one timer of Python's that needs neither its lock nor a thread of its own.
    faulthandler.dump_traceback_later(seconds, exit=True, file=_NOWHERE)


_NOWHERE = os.open(os.devnull, os.O_WRONLY)  # as long as the process


if __name__ == "__main__":
    _main()
