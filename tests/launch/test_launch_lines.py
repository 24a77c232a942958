"""Cutting bytes into lines, whatever the pieces they come in."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdist_ext.launch.lines import Line, LineSplitter


def cut(data: bytes, sizes=(), limit=65_536):
    splitter = LineSplitter(limit)
    lines, rest = [], data
    for size in sizes:
        lines += splitter.feed(rest[:size])
        rest = rest[size:]
    return lines + splitter.feed(rest) + splitter.flush()


@pytest.mark.parametrize(
    ("data", "limit", "lines", "reason"),
    [
        (b"", 9, [], "nothing is no line"),
        (b"a\nb\n", 9, ["a", "b"], "the last newline begins no line"),
        (b"a\nb", 9, ["a", ("b", "")], "the last line needs no newline"),
        (b"a\n\nb\n", 9, ["a", "", "b"], "an empty line is a line"),
        (b"a\r\nb\n", 9, [("a", "\r\n"), "b"], "one line end, not two"),
        (b"10%\r20%\n", 9, [("10%", "\r"), "20%"], "a state of a progress bar"),
        (b"10%\r", 9, [("10%", "\r")], "the end decides what an open return was"),
        (b"\xff\xfeok\n", 9, ["\udcff\udcfeok"], "what is no UTF-8 is kept"),
        (b"abcdefghij\n", 4, [("abcd", ""), ("efgh", ""), "ij"], "a long line comes in pieces"),
        ("abcé\n".encode(), 4, ["abcé"], "no character is cut in two"),
        (b"\x1b[1m4/4\x1b[0m \x1b[32m--\x1b[37m\x1b[0m 5ms\x08\x08\n", 99, ["4/4 -- 5ms"], "Keras"),
        (b"\x1b[38;2;255;0;0mred\x1b[K\x1b[2A\x1b[?25l\n", 99, ["red"], "a terminal's codes"),
        (b"\x1b]8;;http://a.b\x1b\\a link\x1b]8;;\x07\n", 99, ["a link"], "a link"),
        (b"C:\\[1m] [32m 1;2m ^H\n", 99, ["C:\\[1m] [32m 1;2m ^H"], "not a code"),
    ],
)  # fmt: skip
def test_lines(data, limit, lines, reason):
    expected = [Line(*line) if isinstance(line, tuple) else Line(line) for line in lines]
    assert cut(data, limit=limit) == expected, reason


PIECES = st.lists(
    st.sampled_from([b"\n", b"\r", b"a", b"bc", "é".encode(), "😀".encode(), b"\xff", b"x" * 9])
).map(b"".join)


@settings(max_examples=100, deadline=None)
@given(PIECES, st.lists(st.integers(0, 6), max_size=12), st.sampled_from([5, 65_536]))
def test_no_byte_is_lost_in_whatever_pieces_they_arrive(data, sizes, limit):
    whole = "".join(text + end for text, end in cut(data, sizes, limit))
    assert whole.encode("utf-8", "surrogateescape") == data


def test_memory_stays_within_the_limit():
    splitter = LineSplitter(limit=1000)
    for _ in range(100):
        splitter.feed(b"x" * 777)
        assert len(splitter._rest) <= 1000
