"""What the tasks write: shown line by line with the task's name, and kept in its log file.

The messages that TensorFlow writes at every start are not shown.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import re
import select
import threading
import time
from collections import deque
from pathlib import Path
from typing import BinaryIO, NamedTuple, TextIO

from tfdist_ext.errors import LaunchError

LAST_LINES = 20
_QUIET = 1.0  # seconds without output after which an unfinished line is shown
_REWRITE = 1.0  # seconds between two states of a progress bar
# Seconds to wait for the end of a pipe after the task has ended: a grandchild may hold it open.
_DRAIN = 1.0
_TICK = 0.2
_READ = 65_536  # bytes; the capacity of a pipe, so one read empties it
_LONGEST = 65_536  # characters; a longer line comes in pieces
# A carriage return at the very end stays undecided: the next byte may be its newline.
_END = re.compile(r"\r?\n|\r(?!\Z)")
# Codes for terminals: colors, cursor movements, and the backspaces of progress bars.
_CODE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\n]*(?:\x07|\x1b\\)|[@-Z\\^_])|\x08")
# What TensorFlow writes before it reads TF_CPP_MIN_LOG_LEVEL, as
# "I0000 00:00:1795702528.736741    2947 port.cc:153] oneDNN custom operations are on.", and
# "2026-11-26 12:13:14.567890: I tensorflow/core/util/port.cc:153] oneDNN ...".
STARTUP_NOISE = re.compile(
    r"(?:I\d{4} \d\d:\d\d:\d+(?:\.\d+)? +\d+ |\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+: I )"
    r"(?:[\w.+-]+/)*(?:port|cudart_stub)\.cc:\d+\] .*"
    # A machine without a GPU. Other errors of CUDA are shown.
    r"|E\d{4} .* cuda_platform\.cc:\d+\] failed call to cuInit: .*"
    r"(?:UNKNOWN ERROR \(303\)|CUDA_ERROR_NO_DEVICE: .*)"
    r"|WARNING: All log messages before absl::InitializeLog\(\) is called are written to STDERR"
)


class Line(NamedTuple):
    """One line, without its end and without codes for terminals.

    Attributes:
        text: the line.
        is_rewritten: whether a carriage return follows, as in a progress bar.
    """

    text: str
    is_rewritten: bool = False


class LineSplitter:
    """Cuts bytes at newlines and carriage returns. Bytes that are not UTF-8 are replaced."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""

    def feed(self, data: bytes) -> list[Line]:
        """The lines that `data` completes."""
        text = self._rest + self._decoder.decode(data)
        lines, start = [], 0
        for end in _END.finditer(text):
            lines.append(_line(text[start : end.end()]))
            start = end.end()
        self._rest = text[start:]
        return lines if len(self._rest) < _LONGEST else lines + self.flush()

    def flush(self) -> list[Line]:
        """The incomplete line at the end, if there is one."""
        rest, self._rest = self._rest, ""
        return [_line(rest)] if rest else []


def _line(text: str) -> Line:
    return Line(_CODE.sub("", text.rstrip("\r\n")), text.endswith("\r"))


class Printer:
    """Writes text to a stream, until the stream cannot be written to any more."""

    def __init__(self, stream: TextIO) -> None:
        self._stream: TextIO | None = stream
        self._lock = threading.Lock()
        try:
            stream.flush()
            # A notebook's stream has no buffer, and its own descriptor is that of the kernel's log.
            self._fd: int | None = stream.buffer.fileno()
        except (AttributeError, OSError, ValueError):  # not a file: a StringIO, a test's capture
            self._fd = None

    def write(self, text: str) -> None:
        """Write and flush. Characters that the stream cannot encode become question marks."""
        with self._lock:
            try:
                if self._stream is not None:
                    self._write(text, self._stream)
            except (OSError, ValueError):
                # The reader has gone (`tfdist run ... | head`): the training matters more.
                self._stream = None

    def _write(self, text: str, stream: TextIO) -> None:
        if self._fd is None:
            stream.write(text)
            stream.flush()
            return
        data = text.encode(stream.encoding, "replace")
        # Past the stream's buffer: a thread that hangs in a buffered write (Ctrl-S, a pager)
        # holds its lock, and the interpreter could not end.
        while data:
            try:
                data = data[os.write(self._fd, data) :]
            except BlockingIOError:  # a terminal that a parent has made non-blocking
                select.select([], [self._fd], [])


class TaskOutput:
    """The output of one process, read by a thread of its own.

    Args:
        name: of the task.
        prefix: stands before each line that is shown.
        log_file: gets every byte that the process writes.
        append: whether the log file has the output of an earlier process of this task.
        screen: shows the lines.
        report: shows why the log file is incomplete.

    Raises:
        LaunchError: the log file cannot be written.

    Attributes:
        write_end: the descriptor of the pipe into which the process writes.
        last_lines: the last lines that were shown.
    """

    def __init__(
        self,
        name: str,
        *,
        prefix: str,
        log_file: Path | None,
        append: bool,
        screen: Printer,
        report: Printer,
    ) -> None:
        self.name = name
        self.last_lines: deque[str] = deque(maxlen=LAST_LINES)
        self._prefix = prefix
        self._log = None if log_file is None else _opened(name, log_file, append)
        self._fd, self.write_end = os.pipe()
        self._screen = screen
        self._report = report
        self._splitter = LineSplitter()
        self._ended_at = float("inf")
        self._rewritten = float("-inf")
        self._thread = threading.Thread(target=self._read_all, name=f"output {name}", daemon=True)

    def start(self) -> None:
        """Begin to read; the process has its copy of `write_end` by now."""
        os.close(self.write_end)
        self._thread.start()

    def task_ended(self) -> None:
        """Stop reading soon: a process that the task has left behind may hold the pipe open."""
        self._ended_at = min(self._ended_at, time.monotonic())

    def wait(self, seconds: float = 2 * _DRAIN) -> bool:
        """Wait until all output is read and shown; returns whether it is."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _read_all(self) -> None:
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        received, is_late = time.monotonic(), False
        while not is_late:
            is_late = time.monotonic() >= self._ended_at + _DRAIN  # then this read is the last
            if poll.poll(0 if is_late else 1000 * _TICK):
                data = os.read(self._fd, _READ)
                if not data:
                    break
                received = time.monotonic()
                self._keep(data)
                self._show(self._splitter.feed(data))
            elif time.monotonic() - received >= _QUIET:
                self._show(self._splitter.flush())
        self._show(self._splitter.flush())
        os.close(self._fd)
        self._close_log()

    def _show(self, lines: list[Line]) -> None:
        for text, is_rewritten in lines:
            if STARTUP_NOISE.fullmatch(text) or (is_rewritten and not self._shows_bar(text)):
                continue
            self.last_lines.append(text)
            self._screen.write(f"{self._prefix}{text}\n")

    def _shows_bar(self, text: str) -> bool:
        """Whether to show this state of a progress bar: one a second, as no line is rewritten."""
        now = time.monotonic()
        if not text or now - self._rewritten < _REWRITE:
            return False
        self._rewritten = now
        return True

    def _keep(self, data: bytes) -> None:
        try:
            while self._log is not None and data:
                data = data[self._log.write(data) :]  # a disk that gets full takes a part
        except OSError as error:  # the training continues
            self._close_log()
            self._report.write(
                f"tfdist: the log file of {self.name} is incomplete: {error}. The run continues."
                " Free some disk space, or use another folder with --log-dir.\n"
            )

    def _close_log(self) -> None:
        if self._log is not None:
            with contextlib.suppress(OSError):
                self._log.close()
            self._log = None


def _opened(name: str, log_file: Path, append: bool) -> BinaryIO:
    try:
        log_file.parent.mkdir(parents=True, exist_ok=True)
        return io.FileIO(log_file, "a" if append else "w")
    except OSError as error:
        raise LaunchError(
            f"the log file of {name} cannot be written: {error}. Use another folder with --log-dir."
        ) from error
