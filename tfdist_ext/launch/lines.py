"""Bytes of a process, in whatever pieces they arrive, cut into lines that can be shown."""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = ["Line", "LineSplitter"]

# A carriage return at the very end stays undecided: the next byte may be its newline.
_END = re.compile(rb"\r?\n|\r(?!\Z)")


class Line(NamedTuple):
    """One line.

    Attributes:
        text: without its end.
        rewritten: whether a carriage return ended it, as in a progress bar.
    """

    text: str
    rewritten: bool = False


class LineSplitter:
    """Cuts at newlines and carriage returns; loses nothing, and keeps at most `limit` bytes.

    A line longer than `limit` bytes comes in pieces of that length. What is no UTF-8 comes as
    replacement characters. The empty text before a carriage return is no line.
    """

    def __init__(self, limit: int = 65_536) -> None:
        self._limit = limit
        self._rest = b""

    @property
    def pending(self) -> bool:
        """Whether something arrived that is no whole line yet."""
        return bool(self._rest)

    def feed(self, data: bytes) -> list[Line]:
        """The lines that `data` completes."""
        data = self._rest + data
        lines: list[Line] = []
        start = 0
        for end in _END.finditer(data):
            self._add(lines, data[start : end.start()], rewritten=end.group() == b"\r")
            start = end.end()
        rest = data[start:]
        while len(rest.removesuffix(b"\r")) > self._limit:
            piece, rest = self._cut(rest)
            lines.append(_line(piece))
        self._rest = rest
        return lines

    def flush(self) -> list[Line]:
        """What is left, as a line: at the end, or when nothing more comes for a while."""
        rest, self._rest = self._rest, b""
        lines: list[Line] = []
        if rest:
            text = rest.removesuffix(b"\r")
            self._add(lines, text, rewritten=text != rest)
        return lines

    def _add(self, lines: list[Line], text: bytes, *, rewritten: bool) -> None:
        while len(text) > self._limit:
            piece, text = self._cut(text)
            lines.append(_line(piece))
        if text or not rewritten:
            lines.append(_line(text, rewritten))

    def _cut(self, text: bytes) -> tuple[bytes, bytes]:
        cut = self._limit
        # Not inside a character of several bytes (at most four).
        while cut > max(self._limit - 3, 1) and text[cut] & 0xC0 == 0x80:
            cut -= 1
        return text[:cut], text[cut:]


def _line(text: bytes, rewritten: bool = False) -> Line:
    return Line(text.decode("utf-8", errors="replace"), rewritten)
