"""Who is missing: peers on loopback sockets."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from tfdist_ext.launch import reserve_ports
from tfdist_ext.strategies import waiting
from tfdist_ext.strategies.waiting import absent, reporting_absent_peers, watch


@pytest.fixture
def there() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def nobody() -> Iterator[str]:
    with reserve_ports(1) as (port,):
        yield f"127.0.0.1:{port}"


def test_absent_peers_are_named_with_their_address(there: str, nobody: str) -> None:
    peers = {"worker:1": there, "worker:2": nobody, "ps:0": "no-such-host.invalid:1"}
    assert absent(peers) == [f"worker:2 ({nobody})", "ps:0 (no-such-host.invalid:1)"]
    assert absent({}) == []


def test_an_ipv6_address_is_understood() -> None:
    try:
        server = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        pytest.skip("this machine has no IPv6")
    with server:
        assert absent({"worker:1": f"[::1]:{server.getsockname()[1]}"}) == []


def test_no_more_than_five_are_tried_and_named(nobody: str) -> None:
    assert len(absent({f"worker:{n}": nobody for n in range(1000)})) == 5


def _reports(peers: dict[str, str], number: int) -> tuple[list[str], list[float]]:
    done, lines, times = threading.Event(), [], []

    def say(line: str) -> None:
        lines.append(line)
        times.append(time.monotonic())
        if len(lines) == number:
            done.set()

    watch("worker:0", peers, "TF_CONFIG", first_after=0.05, done=done, say=say)
    return lines, times


def test_reports_come_ever_less_often(nobody: str) -> None:
    lines, times = _reports({"worker:1": nobody}, 3)
    assert all(line.startswith(f"worker:0: waiting for worker:1 ({nobody}) for ") for line in lines)
    assert "its address right in TF_CONFIG on every task" in lines[0]
    assert times[1] - times[0] >= 0.1
    assert times[2] - times[1] >= 0.2


def test_many_are_shortened(nobody: str) -> None:
    (line,), _ = _reports({f"worker:{n}": nobody for n in range(1, 9)}, 1)
    assert "worker:5" in line
    assert "worker:6" not in line
    assert "and perhaps others" in line


def test_when_all_answer_something_else_is_wrong(there: str) -> None:
    (line,), _ = _reports({"worker:1": there}, 1)
    assert "every task answers" in line
    assert "the same cluster in TF_CONFIG" in line


def test_nothing_is_said_after_the_end(nobody: str) -> None:
    done = threading.Event()
    done.set()
    watch("a", {"b": nobody}, "x", first_after=0.0, done=done, say=lambda _: pytest.fail("said"))


def test_a_limit_ends_the_reports(nobody: str) -> None:
    lines: list[str] = []
    options = {"first_after": 60.0, "done": threading.Event(), "say": lines.append}
    assert watch("worker:0", {"worker:1": nobody}, "TF_CONFIG", limit=0.1, **options)
    assert len(lines) == 2
    assert "is limited to 0.1 s" in lines[1]


def test_a_process_of_its_own_speaks_on_stderr(
    nobody: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "FIRST_AFTER", 0.05)
    said = ""
    with reporting_absent_peers("worker:0", {"worker:1": nobody}, "TF_CONFIG"):
        until = time.monotonic() + 10
        while "waiting for" not in said and time.monotonic() < until:
            time.sleep(0.02)
            said += capfd.readouterr().err
    assert f"worker:0: waiting for worker:1 ({nobody})" in said
    time.sleep(0.3)
    assert capfd.readouterr().err.count("waiting for") <= 1  # one may have been on its way


def test_a_quick_start_is_neither_slowed_nor_commented(
    nobody: str, capfd: pytest.CaptureFixture[str]
) -> None:
    started = time.monotonic()
    with reporting_absent_peers("worker:0", {"worker:1": nobody}, "TF_CONFIG"):
        pass
    assert time.monotonic() - started < 1.5
    assert capfd.readouterr() == ("", "")


def test_an_error_of_the_body_comes_through(nobody: str) -> None:
    with (
        pytest.raises(OSError, match="mine"),
        reporting_absent_peers("worker:0", {"worker:1": nobody}, "TF_CONFIG"),
    ):
        raise OSError("mine")


def test_without_a_python_to_start_it_is_silent(
    nobody: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for executable in ("/no/such/python", "", None):
        monkeypatch.setattr(waiting.sys, "executable", executable)
        with reporting_absent_peers("worker:0", {"worker:1": nobody}, "TF_CONFIG"):
            pass
