"""Cutting bytes into lines, whatever the pieces they come in."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdist_ext.launch.lines import CodeStripper, Line, LineSplitter, without_codes


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
        (b"a\nb", 9, ["a", "b"], "the last line needs no newline"),
        (b"a\n\nb\n", 9, ["a", "", "b"], "an empty line is a line"),
        (b"a\r\nb\r\n", 9, ["a", "b"], "one line end, not two"),
        (b"\r10%\r20%\n", 9, [("10%", True), "20%"], "the text before a first return is none"),
        (b"10%\r", 9, [("10%", True)], "the end decides what an open return was"),
        (b"\xff\xfeok\n", 9, ["\ufffd\ufffdok"], "what is no UTF-8 is replaced"),
        (b"abcdefghij\n", 4, ["abcd", "efgh", "ij"], "a long line comes in pieces"),
        (b"abcd\n", 4, ["abcd"], "exactly the limit is no long line"),
        (b"abcd\r\ne", 4, ["abcd", "e"], "the return counts for nothing"),
        ("abcé\n".encode(), 4, ["abc", "é"], "no character is cut in two"),
        ("a😀b\n".encode(), 4, ["a", "😀", "b"], "nor one of four bytes"),
    ],
)
def test_lines(data, limit, lines, reason):
    expected = [Line(*line) if isinstance(line, tuple) else Line(line) for line in lines]
    assert cut(data, limit=limit) == expected, reason


PIECES = st.lists(
    st.sampled_from([b"\n", b"\r", b"a", b"bc", "é".encode(), "😀".encode(), b"\xff", b"x" * 9])
).map(b"".join)


@settings(max_examples=100, deadline=None)
@given(PIECES, st.lists(st.integers(0, 6), max_size=12), st.sampled_from([5, 8, 65_536]))
def test_the_pieces_in_which_bytes_arrive_change_nothing(data, sizes, limit):
    assert cut(data, sizes, limit) == cut(data, (), limit)


@settings(max_examples=100, deadline=None)
@given(PIECES, st.sampled_from([5, 65_536]))
def test_nothing_but_line_ends_is_lost(data, limit):
    text = "".join(line.text for line in cut(data, (), limit))
    expected = data.replace(b"\r", b"").replace(b"\n", b"").decode(errors="replace")
    # An invalid byte in the middle of a character may be replaced once or twice: leave them out.
    assert text.replace("\ufffd", "") == expected.replace("\ufffd", "")


def test_memory_stays_within_the_limit():
    splitter = LineSplitter(limit=1000)
    for _ in range(100):
        splitter.feed(b"x" * 777)
        assert len(splitter._rest) <= 1000
    assert splitter.pending


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        (
            "\x1b[1m4/4\x1b[0m \x1b[32m━━\x1b[0m\x1b[37m\x1b[0m 5ms\x08\x08\x08",
            "4/4 ━━ 5ms",
        ),  # Keras
        ("\x1b[38;2;255;0;0mred\x1b[K\x1b[2A\x1b[?25l", "red"),
        ("\x1b]8;;http://a.b\x1b\\a link\x1b]8;;\x07", "a link"),
        ("\x1bM\x1b\\a", "a"),
        ("C:\\[1m] [32m 1;2m ^H \t é", "C:\\[1m] [32m 1;2m ^H \t é"),
        ("\x1b", "\x1b"),
    ],
)
def test_codes_for_terminals_are_taken_out_and_nothing_else(text: str, plain: str) -> None:
    assert without_codes(text) == plain
    data = text.encode()
    for cut in range(len(data) + 1):
        stripper = CodeStripper()
        shown = stripper.feed(data[:cut]) + stripper.feed(data[cut:])
        assert (shown + stripper.feed(b"", last=True)).decode() == plain
