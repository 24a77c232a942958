"""Where a Python exception came from, read from the lines that a process writes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

__all__ = ["TracebackReader", "without_own_frames"]

_HEAD = "Traceback (most recent call last):"
_GROUP = "Exception Group " + _HEAD
_IN_GROUP = re.compile(r" *\| ")
_FRAME = re.compile(r'  File "(?P<file>.+)", line (?P<line>\d+), in (?P<name>.+)')
# Also of an exception group, and as faulthandler writes it.
_ANY_FRAME = re.compile(r'(?P<indent>[ |]*)File "(?P<file>.+)", line \d+,? in ')
_PACKAGE = f"{Path(__file__).parents[1]}/"
_INSTALLED = "/site-packages/tfdist_ext/"  # on another machine
_ERROR = re.compile(r"(?P<kind>[A-Za-z_][\w.<>]*)(:.*)?")


class TracebackReader:
    """Reads lines, one after another.

    Attributes:
        raised: all frames of the last traceback, and the exception's class; the same text for the
            same exception in the same place. Of a group it is the last one in it. "" where there
            was none.
        in_own_frame: whether the last line belongs to a frame of this package.
    """

    def __init__(self) -> None:
        self.raised = ""
        self.in_own_frame = False
        self._indent = 0  # of the last frame
        self._frames: list[str] | None = None
        self._in_group = False

    def feed(self, line: str) -> None:
        """The next line."""
        if any_frame := _ANY_FRAME.match(line):
            self._indent, file = len(any_frame["indent"]), any_frame["file"]
            self.in_own_frame = file.startswith(_PACKAGE) or _INSTALLED in file
        elif len(line) - len(line.lstrip(" |")) < self._indent:
            self.in_own_frame = False
        self._in_group |= line.endswith(_GROUP)
        if self._in_group:
            line = _IN_GROUP.sub("", line, count=1)
        if line.endswith(_HEAD):  # after what another thread has not ended
            self._frames = []
        elif self._frames is None:
            return
        elif frame := _FRAME.fullmatch(line):
            self._frames.append(f"{frame['file']}:{frame['line']} in {frame['name']}")
        elif self._frames and not line.startswith(" ") and (error := _ERROR.fullmatch(line)):
            self.raised = f"{error['kind']} at {' < '.join(reversed(self._frames))}"
            self._frames = None


def without_own_frames(lines: Iterable[str]) -> list[str]:
    """The lines of a text without those of frames of this package."""
    reader = TracebackReader()
    shown = []
    for line in lines:
        reader.feed(line)
        if not reader.in_own_frame:
            shown.append(line)
    return shown
