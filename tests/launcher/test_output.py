"""Lines of output: cut from bytes, and start-up messages."""

from __future__ import annotations

from pathlib import Path

import pytest

from tfdist_ext.launcher.output import STARTUP_NOISE, Line, LineSplitter


@pytest.mark.parametrize(
    ("data", "lines", "reason"),
    [
        (b"", [], "nothing is no line"),
        (b"a\nb\n", ["a", "b"], "the last newline begins no line"),
        (b"a\nb", ["a", "b"], "the last line needs no newline"),
        (b"a\n\nb\n", ["a", "", "b"], "an empty line is a line"),
        (b"a\r\nb\n", ["a", "b"], "one line end, not two"),
        (b"10%\r20%\n", [("10%", True), "20%"], "a state of a progress bar"),
        (b"10%\r", [("10%", True)], "the end decides what an open return was"),
        (b"\xffok\n", ["\ufffdok"], "bytes that are not UTF-8 are replaced"),
        ("abcé\n".encode(), ["abcé"], "no character is cut in two"),
        (b"\x1b[1m4/4\x1b[0m \x1b[32m--\x1b[37m\x1b[0m 5ms\x08\x08\n", ["4/4 -- 5ms"], "Keras"),
        (b"\x1b[38;2;255;0;0mred\x1b[K\x1b[2A\x1b[?25l\n", ["red"], "a terminal's codes"),
        (b"\x1b]8;;http://a.b\x1b\\a link\x1b]8;;\x07\n", ["a link"], "a link"),
        (b"C:\\[1m] [32m 1;2m ^H\n", ["C:\\[1m] [32m 1;2m ^H"], "not a code"),
    ],
)
@pytest.mark.parametrize("size", [1, 99])
def test_bytes_are_split_into_lines(data, size, lines, reason):
    splitter, found = LineSplitter(), []
    for start in range(0, len(data), size):
        found += splitter.feed(data[start : start + size])
    expected = [Line(*line) if isinstance(line, tuple) else Line(line) for line in lines]
    assert found + splitter.flush() == expected, reason


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
def test_startup_messages_are_recognized(line: str, is_noise: bool) -> None:
    assert bool(STARTUP_NOISE.fullmatch(line)) == is_noise


def test_startup_messages_go_only_to_the_log(run_tasks, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text(f"{ABSL}\nI{GLOG}{ONEDNN}\nEpoch 1/2 uses oneDNN\n")
    ran = run_tasks(
        {"worker:0": f"cat {text}; echo level $TF_CPP_MIN_LOG_LEVEL; kill -9 $$"}, log_dir=tmp_path
    )
    assert ran.lines("worker:0") == ["Epoch 1/2 uses oneDNN", "level 1"]
    assert ran.result.last_lines == {"worker:0": ("Epoch 1/2 uses oneDNN", "level 1")}
    assert (tmp_path / "worker-0.log").read_text() == text.read_text() + "level 1\n"
