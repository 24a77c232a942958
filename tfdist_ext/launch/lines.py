"""The lines that a process writes: cut from its bytes, and what they say.

The messages that TensorFlow writes at every start are not shown. Some lines blame another task for
a failure.
"""

from __future__ import annotations

import codecs
import re
from typing import NamedTuple

__all__ = ["STARTUP_NOISE", "Blame", "Line", "LineSplitter", "blame_in"]

_LONGEST = 65_536  # characters; a longer line comes in pieces
# A carriage return at the very end stays undecided: the next byte may be its newline.
_END = re.compile(r"\r?\n|\r(?!\Z)")
# Codes for terminals: colors, cursor movements, and the backspaces of progress bars.
_CODE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\n]*(?:\x07|\x1b\\)|[@-Z\\^_])|\x08")


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
