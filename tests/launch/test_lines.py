"""Lines of output: cut from bytes, start-up messages, and the place of an exception."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdist_ext.launch.lines import Line, LineSplitter, TracebackReader, is_startup_noise


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


GLOG = "0000 00:00:1795702528.736741    2947 "
ONEDNN = "port.cc:153] oneDNN custom operations are on. You may see slightly different numerical"
ABSL = "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR"
CUDA = f"E{GLOG}cuda_platform.cc:52] failed call to cuInit: INTERNAL: CUDA error: Failed call to"


@pytest.mark.parametrize(
    ("line", "is_noise"),
    [
        (ABSL, True),
        (f"I{GLOG}{ONEDNN}", True),
        (f"2026-11-26 12:13:14.567890: I tensorflow/core/util/{ONEDNN}", True),
        (f"I{GLOG}cudart_stub.cc:31] Could not find cuda drivers on your machine", True),
        (f"{CUDA} cuInit: UNKNOWN ERROR (303)", True),
        (f"{CUDA} cuInit: CUDA_ERROR_UNKNOWN: unknown error", False),  # a GPU that does not work
        (f"I have read: {ONEDNN}", False),
        (f"W{GLOG}coordination_service.cc:502] a task is late", False),
        ("", False),
    ],
)
def test_startup_noise(line: str, is_noise: bool) -> None:
    assert is_startup_noise(line) == is_noise


def test_a_run_does_not_show_it(run_tasks, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text(f"{ABSL}\nI{GLOG}{ONEDNN}\nEpoch 1/2 uses oneDNN\n")
    ran = run_tasks(
        {"worker:0": f"cat {text}; echo level $TF_CPP_MIN_LOG_LEVEL; kill -9 $$"}, log_dir=tmp_path
    )
    assert ran.lines("worker:0") == ["Epoch 1/2 uses oneDNN", "level 1"]
    assert ran.result.last_lines == {"worker:0": ("Epoch 1/2 uses oneDNN", "level 1")}
    assert (tmp_path / "worker-0.log").read_text() == text.read_text() + "level 1\n"


def place_of(function: str, error: BaseException, line: int = 7) -> str:
    reader = TracebackReader()
    for text in (
        "Epoch 1/3",
        "Traceback (most recent call last):",
        '  File "train.py", line 20, in <module>',
        "    main()",
        f'  File "train.py", line {line}, in {function}',
        "    raise error",
        "    ^^^^^^^^^^^",
        f"{type(error).__name__}: {error}",
        "and so on",
    ):
        reader.feed(text)
    return reader.raised


def test_the_place_of_an_exception() -> None:
    place = place_of("step", ValueError("one"))
    assert place == "ValueError at train.py:7 in step < train.py:20 in <module>"
    assert place == place_of("step", ValueError("another text"))
    assert place != place_of("step", ValueError("one"), line=8)
    assert place != place_of("step", KeyError("one"))


def test_the_place_of_the_last_exception_of_a_group() -> None:
    reader = TracebackReader()
    for line in (
        "  + Exception Group Traceback (most recent call last):",
        '  |   File "train.py", line 9, in <module>',
        '  |     raise ExceptionGroup("both", errors)',
        "  | ExceptionGroup: both (1 sub-exception)",
        "  +-+---------------- 1 ----------------",
        "    | Traceback (most recent call last):",
        '    |   File "train.py", line 5, in load',
        '    |     raise OSError("gone")',
        "    | OSError: gone",
        "    +------------------------------------",
    ):
        reader.feed(line)
    assert reader.raised == "OSError at train.py:5 in load"
