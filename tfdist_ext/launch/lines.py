"""Bytes of a process, in whatever pieces they arrive, cut into lines that can be shown.

And without the codes for terminals: colors, cursor movements, and the backspaces of progress bars.
"""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = ["CodeStripper", "Line", "LineSplitter", "without_codes"]

# A carriage return at the very end stays undecided: the next byte may be its newline.
_END = re.compile(rb"\r?\n|\r(?!\Z)")
_CODE = r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\n]*(?:\x07|\x1b\\)|[@-Z\\^_])|\x08"
_TEXT_CODE, _BYTES_CODE = re.compile(_CODE), re.compile(_CODE.encode())
# An incomplete code at the end of the bytes. The lengths are limited to those of real codes.
_UNFINISHED = re.compile(rb"\x1b(?:\[[0-?]{0,99}[ -/]{0,9}|\][^\x07\x1b\n]{0,9999}\x1b?)?\Z")


def without_codes(text: str) -> str:
    """The text without codes for terminals."""
    return _TEXT_CODE.sub("", text)


class CodeStripper:
    """Takes the codes for terminals out of bytes that arrive in pieces."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes, *, last: bool = False) -> bytes:
        """Returns the bytes without codes; keeps an incomplete code until the next call."""
        data, self._rest = _BYTES_CODE.sub(b"", self._rest + data), b""
        if not last and (found := _UNFINISHED.search(data)):
            data, self._rest = data[: found.start()], found.group()
        return data


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
