"""Bytes of a process, in whatever pieces they arrive, cut into lines that can be shown."""

from __future__ import annotations

import codecs
import re
from typing import NamedTuple

__all__ = ["Line", "LineSplitter"]

# A carriage return at the very end stays undecided: the next byte may be its newline.
_END = re.compile(r"\r?\n|\r(?!\Z)")
# Codes for terminals: colors, cursor movements, and the backspaces of progress bars.
_CODE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\n]*(?:\x07|\x1b\\)|[@-Z\\^_])|\x08")


class Line(NamedTuple):
    """One line, without codes for terminals.

    Attributes:
        text: without its end; bytes that are no UTF-8 are surrogates.
        end: a newline, a carriage return as in a progress bar, or "" where it is not whole.
    """

    text: str
    end: str = "\n"


class LineSplitter:
    """Cuts at newlines and carriage returns; loses nothing, and keeps `limit` characters at most.

    A longer line comes in pieces.
    """

    def __init__(self, limit: int = 65_536) -> None:
        self._limit = limit
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self._rest = ""

    @property
    def pending(self) -> bool:
        """Whether something arrived that is no whole line yet."""
        return bool(self._rest)

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
        """The rest: at the end, or when nothing more comes for a while."""
        rest, self._rest = self._rest + self._decoder.decode(b"", final=True), ""
        text = rest.removesuffix("\r")
        return self._pieces(text, rest[len(text) :]) if rest else []

    def _pieces(self, text: str, end: str) -> list[Line]:
        starts = range(0, max(len(text), 1), self._limit)
        pieces = [_CODE.sub("", text[start : start + self._limit]) for start in starts]
        return [*(Line(piece, "") for piece in pieces[:-1]), Line(pieces[-1], end)]
