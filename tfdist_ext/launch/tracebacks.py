"""Where a Python exception came from, read from the lines that a process writes."""

from __future__ import annotations

import re

__all__ = ["TracebackReader"]

_HEAD = "Traceback (most recent call last):"
_MARGIN = re.compile(r" *\| ")  # of an exception group
_FRAME = re.compile(r'  File "(?P<file>.+)", line (?P<line>\d+), in (?P<name>.+)')
_ERROR = re.compile(r"(?P<kind>[A-Za-z_][\w.<>]*)(:.*)?")


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
