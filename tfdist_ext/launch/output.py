"""What the tasks write: shown line by line with the task's name, and kept in its log file."""

from __future__ import annotations

import contextlib
import io
import os
import queue
import select
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO, TextIO

from tfdist_ext.errors import LaunchError
from tfdist_ext.launch.lines import CodeStripper, Line, LineSplitter, without_codes
from tfdist_ext.launch.report import Blame, blame_in, log_report
from tfdist_ext.launch.startup_noise import StartupNoise
from tfdist_ext.launch.tracebacks import TracebackReader

__all__ = ["OutputPump", "Printer", "wants_color"]

LAST_LINES = 20
_QUIET = 1.0  # seconds without output after which an unfinished line is shown
_REWRITE = 1.0  # seconds between two states of a progress bar
# Seconds to wait for the end of a pipe after the task has ended: a grandchild may hold it open.
_DRAIN = 1.0
_TICK = 0.2
_READ = 65_536  # bytes; all that a pipe holds, so one read empties that of a task that has ended
_COLORS = (36, 33, 35, 32, 34, 96, 93, 95, 92, 94)


def wants_color(stream: TextIO, env: Mapping[str, str]) -> bool:
    """Whether the stream is a terminal that shows colors, and NO_COLOR is not set."""
    try:
        terminal = stream.isatty()
    except ValueError:  # closed
        return False
    return terminal and not env.get("NO_COLOR") and env.get("TERM") != "dumb"


class Printer:
    """Writes text to a stream; a stream that cannot be written to any more is left alone."""

    def __init__(self, stream: TextIO) -> None:
        self._stream: TextIO | None = stream
        try:
            stream.flush()
            # Of its buffer: a notebook's stream, which has none, gives that of the kernel's log.
            self._fd: int | None = stream.buffer.fileno()
        except (AttributeError, OSError, ValueError):  # not a file: a StringIO, a test's capture
            self._fd = None

    def write(self, text: str) -> None:
        """Write and flush. What the stream's encoding does not have becomes a question mark."""
        if self._stream is None:
            return
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        try:
            data = text.encode(encoding, "replace")
            if self._fd is None:
                self._stream.write(data.decode(encoding))
                self._stream.flush()
            # Past the stream's buffer: a thread that hangs in a buffered write (Ctrl-S, a pager)
            # holds its lock, and the interpreter could not end.
            while self._fd is not None and data:
                try:
                    data = data[os.write(self._fd, data) :]
                except BlockingIOError:  # a terminal that a parent has made non-blocking
                    select.select([], [self._fd], [])
        except (OSError, ValueError):
            # The reader has gone (`tfdist run ... | head`): the training matters more.
            self._stream = None


class _Channel:
    """One task's pipe, on its way to the screen and to its log.

    Args:
        codes: whether codes for terminals are shown.
        raw: whether the screen and the log get all that the task writes.
    """

    def __init__(
        self, name: str, fd: int, prefix: str, log: BinaryIO | None, *, codes: bool, raw: bool
    ) -> None:
        self.name = name
        self.fd = os.dup(fd)  # its own: no one else closes it while the thread reads
        self.prefix = prefix
        self.log = log
        self.log_error: OSError | None = None  # why the log lacks what came after
        self.splitter = LineSplitter()
        self.codes = codes or raw
        self.stripper = None if raw else CodeStripper()
        self.noise = None if raw else StartupNoise()
        self.last_lines: deque[str] = deque(maxlen=LAST_LINES)
        self.blame: Blame | None = None
        self.traceback = TracebackReader()
        self.drained = threading.Event()
        self.deadline: float | None = None
        self.ended = False
        self._heard = 0.0
        self._rewritten = float("-inf")
        self._held: str | None = None

    def received(self, data: bytes, now: float) -> str:
        """What is to be shown now that `data` has arrived."""
        self._heard = now
        self._keep(data)
        return self._shown(self.splitter.feed(data), now)

    def unfinished(self, now: float, *, closed: bool = False) -> str:
        """What is to be shown of an unfinished line: once it is quiet, or at the end."""
        if not closed and now - self._heard < _QUIET:
            return ""
        text = self._shown(self.splitter.flush(), now)
        if self._held is not None:
            text += self._line(self._held)
            self._held = None
        return text

    @property
    def waits(self) -> bool:
        """Whether there is something to do although nothing arrives."""
        return self.splitter.pending or self._held is not None or self.deadline is not None

    def _shown(self, lines: list[Line], now: float) -> str:
        text = ""
        for line in lines:
            # A progress bar rewrites its line many times a second; the lines of several tasks
            # cannot be rewritten, so it is shown now and then. The log has it all.
            if line.rewritten and not without_codes(line.text):
                continue
            if line.rewritten and now - self._rewritten < _REWRITE:
                self._held = line.text
                continue
            if line.rewritten:
                self._rewritten = now
            self._held = None
            text += self._line(line.text)
        return text

    def _line(self, text: str) -> str:
        plain = without_codes(text)
        if self.noise is not None and self.noise.has(plain):
            return ""
        self.blame = blame_in(plain) or self.blame
        self.traceback.feed(plain)
        if not self.traceback.in_own_frame:
            self.last_lines.append(plain)
        return f"{self.prefix}{text if self.codes else plain}\n"

    def _keep(self, data: bytes, *, last: bool = False) -> None:
        if self.stripper is not None:
            data = self.stripper.feed(data, last=last)
        try:
            while self.log is not None and data:
                data = data[self.log.write(data) :]  # a disk that gets full takes a part
        except OSError as error:  # no reason to end the training; it is reported
            self.log_error = error
            self.close_log()

    def close_log(self) -> None:
        if self.log is not None:
            with contextlib.suppress(OSError):
                self.log.close()
            self.log = None

    def close(self) -> None:
        self._keep(b"", last=True)
        self.close_log()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class OutputPump:
    """One thread that reads the pipes of all tasks, so that their lines never mix.

    Add the tasks, `start`, tell of each `task_ended`, and `close`.

    Args:
        color: whether the printer writes to a terminal that shows colors.
        raw: whether all that tasks write is shown, and kept: also what TensorFlow writes at every
            start, and codes for terminals.
    """

    def __init__(
        self,
        printer: Printer,
        names: list[str],
        *,
        color: bool,
        report: Printer,
        raw: bool = False,
    ) -> None:
        self._printer = printer
        self._report = report
        self._names = names
        self._color = color
        self._raw = raw
        self._channels: dict[str, _Channel] = {}
        self._added: queue.SimpleQueue[_Channel] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[_Channel] = queue.SimpleQueue()
        self._closing = False
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._loop, name="task output", daemon=True)

    def add(self, name: str, fd: int, log_file: Path | None) -> None:
        """Read a task's output from `fd`, also in the place of that of an earlier process.

        Raises:
            LaunchError: the log file cannot be written.
        """
        log: BinaryIO | None = None
        if log_file is not None:
            goes_on = name in self._channels
            try:
                log_file.parent.mkdir(parents=True, exist_ok=True)
                log = io.FileIO(log_file, "a" if goes_on else "w")
            except OSError as error:
                raise LaunchError(
                    f"the log file of {name} cannot be written: {error}; "
                    "give another folder with --log-dir"
                ) from error
        # Only reading is made non-blocking; the task's end of the pipe is another description.
        os.set_blocking(fd, False)
        channel = _Channel(name, fd, self._prefix(name), log, codes=self._color, raw=self._raw)
        self._channels[name] = channel
        self._added.put(channel)
        self._wake()

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()

    def task_ended(self, name: str) -> None:
        """The task is over: its output is still read, but not waited for where others hold it."""
        self._ended.put(self._channels[name])
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self._wake_write, b"x")

    def log_errors(self) -> dict[str, OSError]:
        """Task -> what has ended its log file before its output."""
        channels = self._channels.values()
        return {each.name: each.log_error for each in channels if each.log_error is not None}

    def last_lines(self, name: str) -> tuple[str, ...]:
        """The last lines of a task; for each that was added."""
        return tuple(self._channels[name].last_lines)

    def blame(self, name: str) -> Blame | None:
        """Whom a task that has ended blames for its failure, by its last words about it."""
        return self._drained(name).blame

    def raised(self, name: str) -> str:
        """The Python exception that a task which has ended has shown last, and its place."""
        return self._drained(name).traceback.raised

    def _drained(self, name: str) -> _Channel:
        channel = self._channels[name]
        channel.drained.wait(2 * _DRAIN)
        return channel

    def close(self, give_up: Callable[[], bool] = lambda: False) -> None:
        """Show what has been written until now, and close the log files.

        A reader may take its time (a pager, Ctrl-S): `give_up` is asked whether to wait for it.
        """
        self._closing = True
        for name in self._channels:
            self.task_ended(name)
        self._wake()
        while self._thread.is_alive() and not give_up():
            self._thread.join(timeout=0.05)
        if not self._thread.is_alive():
            for channel in self._channels.values():
                channel.close()
            self._selector.close()
            os.close(self._wake_read)
            os.close(self._wake_write)

    def _prefix(self, name: str) -> str:
        width = max(len(other) for other in self._names) + 2
        label = f"[{name}]"
        padding = " " * (width - len(label) + 1)
        if self._color:
            label = f"\x1b[{_COLORS[self._names.index(name) % len(_COLORS)]}m{label}\x1b[0m"
        return label + padding

    def _loop(self) -> None:
        open_channels: list[_Channel] = []
        # A task may come after all others have ended.
        while open_channels or not self._closing or not self._added.empty():
            timeout = _TICK if any(channel.waits for channel in open_channels) else None
            ready = self._selector.select(timeout)
            now = time.monotonic()
            for key, _ in ready:
                if key.data is None:
                    os.read(self._wake_read, 4096)
                    self._note_added(open_channels)
                    self._note_ended(now)
                else:
                    self._read(key.data, now)
            for channel in list(open_channels):
                self._printer.write(channel.unfinished(now))
                late = channel.deadline is not None and now >= channel.deadline
                if channel.ended or late:
                    self._finish(channel, open_channels)

    def _note_added(self, open_channels: list[_Channel]) -> None:
        while not self._added.empty():
            channel = self._added.get()
            self._selector.register(channel.fd, selectors.EVENT_READ, channel)
            open_channels.append(channel)

    def _note_ended(self, now: float) -> None:
        while not self._ended.empty():
            channel = self._ended.get()
            if channel.deadline is None:
                channel.deadline = now + _DRAIN

    def _read(self, channel: _Channel, now: float) -> None:
        try:
            data = os.read(channel.fd, _READ)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        channel.ended = not data
        had_log = channel.log is not None
        self._printer.write(channel.received(data, now))
        if had_log and channel.log_error is not None:
            self._report.write(log_report({channel.name: channel.log_error}))

    def _finish(self, channel: _Channel, open_channels: list[_Channel]) -> None:
        self._selector.unregister(channel.fd)
        open_channels.remove(channel)
        self._printer.write(channel.unfinished(time.monotonic(), closed=True))
        channel.close()
        channel.drained.set()
