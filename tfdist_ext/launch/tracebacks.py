"""What the lines of a process say about its failure: where it was raised, and whom it blames."""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = ["Blame", "TracebackReader", "blame_in"]

_HEAD = "Traceback (most recent call last):"
_MARGIN = re.compile(r" *\| ")  # of an exception group
_FRAME = re.compile(r'  File "(?P<file>.+)", line (?P<line>\d+), in (?P<name>.+)')
_ERROR = re.compile(r"(?P<kind>[A-Za-z_][\w.<>]*)(:.*)?")
# The last line of a PeerError's traceback, and of the error that a task is missing at the start;
# what TensorFlow logs where one's process is gone.
_BLAMES = (
    re.compile(r"PeerError: (?P<words>(?P<job>\w+):(?P<index>\d+) .*)"),
    re.compile(r"StrategyError: (?P<words>.* no answer from (?P<job>\w+):(?P<index>\d+) .*)"),
    re.compile(r"(?P<words>Error reported from /job:(?P<job>\w+)/task:(?P<index>\d+).*)"),
)


class Blame(NamedTuple):
    """What a task has written about another one.

    Attributes:
        task: because of which it failed, as "worker:1".
        words: its sentence.
    """

    task: str
    words: str


def blame_in(line: str) -> Blame | None:
    """The task that a line of output blames, if it does."""
    for pattern in _BLAMES:
        if found := pattern.search(line):
            return Blame(f"{found['job']}:{found['index']}", found["words"])
    return None


class TracebackReader:
    """Reads lines, one after another.

    Attributes:
        raised: all frames of the last traceback, and the exception's class; the same text for the
            same exception in the same place. "" where there was none.
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
