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
            lines += self._lines(data[start : end.start()], rewritten=end.group() == b"\r")
            start = end.end()
        *pieces, self._rest = self._cut(data[start:])
        return lines + [_line(piece) for piece in pieces]

    def flush(self) -> list[Line]:
        """The rest as a line: at the end, or when nothing more comes for a while."""
        rest, self._rest = self._rest, b""
        text = rest.removesuffix(b"\r")
        return self._lines(text, rewritten=text != rest) if rest else []

    def _lines(self, text: bytes, *, rewritten: bool) -> list[Line]:
        *pieces, last = self._cut(text)
        lines = [_line(piece) for piece in pieces]
        return [*lines, _line(last, rewritten)] if last or not rewritten else lines

    def _cut(self, text: bytes) -> list[bytes]:
        """Pieces of at most `limit` bytes, but for a carriage return at the end of the last."""
        pieces = []
        while len(text.removesuffix(b"\r")) > self._limit:
            cut = self._limit
            # Not inside a character of several bytes (at most four).
            while cut > max(self._limit - 3, 1) and text[cut] & 0xC0 == 0x80:
                cut -= 1
            pieces.append(text[:cut])
            text = text[cut:]
        return [*pieces, text]


def _line(text: bytes, rewritten: bool = False) -> Line:
    return Line(text.decode("utf-8", errors="replace"), rewritten)
