"""The lines that a process writes: cut from its bytes, and what they say.

The messages that TensorFlow writes at every start are not shown. Tracebacks say where a failure was
raised, and some lines blame another task for it.
"""

from __future__ import annotations

import codecs
import re
from typing import NamedTuple

__all__ = ["Blame", "Line", "LineSplitter", "TracebackReader", "blame_in", "is_startup_noise"]

# A carriage return at the very end stays undecided: the next byte may be its newline.
_END = re.compile(r"\r?\n|\r(?!\Z)")
# Codes for terminals: colors, cursor movements, and the backspaces of progress bars.
_CODE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\n]*(?:\x07|\x1b\\)|[@-Z\\^_])|\x08")


class Line(NamedTuple):
    """One line, without codes for terminals.

    Attributes:
        text: without its end; bytes that are not UTF-8 are surrogates.
        end: a newline, a carriage return as in a progress bar, or "" where the line is incomplete.
    """

    text: str
    end: str = "\n"


class LineSplitter:
    """Cuts bytes at newlines and carriage returns.

    No byte is lost. A line of more than `limit` characters comes in pieces.
    """

    def __init__(self, limit: int = 65_536) -> None:
        self._limit = limit
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self._rest = ""

    def feed(self, data: bytes) -> list[Line]:
        """The lines that `data` completes."""
        text = self._rest + self._decoder.decode(data)
        lines, start = [], 0
        for end in _END.finditer(text):
            lines += self._pieces(text[start : end.start()], end.group())
            start = end.end()
        self._rest = text[start:]
        if len(self._rest) > self._limit:
            *pieces, last = self._pieces(self._rest, "")
            lines, self._rest = lines + pieces, last.text
        return lines

    def flush(self) -> list[Line]:
        """The incomplete line at the end, if there is one."""
        rest, self._rest = self._rest + self._decoder.decode(b"", final=True), ""
        text = rest.removesuffix("\r")
        return self._pieces(text, rest[len(text) :]) if rest else []

    def _pieces(self, text: str, end: str) -> list[Line]:
        starts = range(0, max(len(text), 1), self._limit)
        pieces = [_CODE.sub("", text[start : start + self._limit]) for start in starts]
        return [*(Line(piece, "") for piece in pieces[:-1]), Line(pieces[-1], end)]


# What TensorFlow writes before it reads TF_CPP_MIN_LOG_LEVEL, as
# "I0000 00:00:1795702528.736741    2947 port.cc:153] oneDNN custom operations are on.", and
# "2026-11-26 12:13:14.567890: I tensorflow/core/util/port.cc:153] oneDNN ...".
_STARTUP_NOISE = re.compile(
    r"(?:I\d{4} \d\d:\d\d:\d+(?:\.\d+)? +\d+ |\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+: I )"
    r"(?:[\w.+-]+/)*(?:port|cudart_stub)\.cc:\d+\] .*"
    # A machine without a GPU. Other errors of CUDA are shown.
    r"|E\d{4} .* cuda_platform\.cc:\d+\] failed call to cuInit: .*"
    r"(?:UNKNOWN ERROR \(303\)|CUDA_ERROR_NO_DEVICE: .*)"
    r"|WARNING: All log messages before absl::InitializeLog\(\) is called are written to STDERR"
)


def is_startup_noise(line: str) -> bool:
    """Whether TensorFlow writes this line at every start."""
    return _STARTUP_NOISE.fullmatch(line) is not None


_HEAD = "Traceback (most recent call last):"
_MARGIN = re.compile(r" *\| ")  # of an exception group
_FRAME = re.compile(r'  File "(?P<file>.+)", line (?P<line>\d+), in (?P<name>.+)')
_ERROR = re.compile(r"(?P<kind>[A-Za-z_][\w.<>]*)(:.*)?")
# The last line of a PeerError's traceback, and of the error about a task that is missing at the
# start; what TensorFlow logs when the process of a task is gone.
_BLAMES = (
    re.compile(r"PeerError: (?P<words>(?P<job>\w+):(?P<index>\d+) .*)"),
    re.compile(r"StrategyError: (?P<words>.* no answer from (?P<job>\w+):(?P<index>\d+) .*)"),
    re.compile(r"(?P<words>Error reported from /job:(?P<job>\w+)/task:(?P<index>\d+).*)"),
)


class Blame(NamedTuple):
    """What a task has written about the task that made it fail.

    Attributes:
        task: the other task, as "worker:1".
        words: the sentence about it.
    """

    task: str
    words: str


def blame_in(line: str) -> Blame | None:
    """The task that a line of output blames; None where it blames no task."""
    for pattern in _BLAMES:
        if found := pattern.search(line):
            return Blame(f"{found['job']}:{found['index']}", found["words"])
    return None


class TracebackReader:
    """Finds the last Python exception in lines of output.

    Attributes:
        raised: the class of the exception and all its frames; the same text for the same exception
            in the same place. "" where there was none.
    """

    def __init__(self) -> None:
        self.raised = ""
        self._frames: list[str] | None = None

    def feed(self, line: str) -> None:
        """The next line."""
        if line.endswith(_HEAD):  # after what another thread has not ended
            self._frames = []
            return
        if self._frames is None:
            return
        line = _MARGIN.sub("", line, count=1)
        if frame := _FRAME.fullmatch(line):
            self._frames.append(f"{frame['file']}:{frame['line']} in {frame['name']}")
        elif self._frames and not line.startswith(" ") and (error := _ERROR.fullmatch(line)):
            self.raised = f"{error['kind']} at {' < '.join(reversed(self._frames))}"
            self._frames = None
