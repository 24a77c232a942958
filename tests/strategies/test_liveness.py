"""Whether the leading task is there, by its address; and which task that is."""

from __future__ import annotations

import socket

import pytest

from tfdist_ext import Task
from tfdist_ext.strategies import waiting
from tfdist_ext.strategies.liveness import Presence, driver_of
from tfdist_ext.strategies.resolvers import Described
from tfdist_ext.strategies.serving import serves


def test_who_was_there_and_is_silent_four_times_in_a_row_is_gone() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        chief = Presence("ps:0", "chief:0", address, "TF_CONFIG")
        for _ in range(5):  # bound, but nobody listens: it has not come yet
            assert not chief.look()
        assert (chief.seen, chief.gone) == (False, False)
        listener.listen()
        assert chief.look()
    assert (chief.seen, chief.gone) == (True, False)
    assert [(chief.look(), chief.gone) for _ in range(4)] == [
        (False, False),
        (False, False),
        (False, False),
        (False, True),
    ]


def test_who_was_seen_in_another_way_has_as_many_looks() -> None:
    chief = Presence("ps:0", "chief:0", "127.0.0.1:1", "TF_CONFIG")
    for _ in range(5):
        chief.look()
    chief.seen = True
    for _ in range(3):
        chief.look()
    assert not chief.gone
    chief.look()
    assert chief.gone


def test_waiting_is_said_and_ever_less_often(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter([0.0, 9.0, 10.0, 19.0, 20.0, 39.0, 40.0, 200.0, 319.0, 320.0])
    monkeypatch.setattr("tfdist_ext.strategies.liveness.time.monotonic", lambda: next(clock))
    monkeypatch.setattr(waiting, "absent", lambda tasks: list(tasks))
    chief = Presence("ps:0", "chief:0", "10.0.0.1:22", "TF_CONFIG")
    for _ in range(9):
        chief.look()
    lines = capsys.readouterr().err.splitlines()
    since = [line.split(") for ")[1].split(" s.")[0] for line in lines]
    assert since == ["10", "20", "40", "200", "320"]
    assert lines[0] == (
        "ps:0: waiting for chief:0 (10.0.0.1:22) for 10 s. Is it started, is its address right"
        " in TF_CONFIG on every task, can this host reach it?"
    )


FULL = {"chief": ("c:1",), "worker": ("w:1", "w:2"), "ps": ("p:1",)}


@pytest.mark.parametrize(
    ("jobs", "task", "driver", "serving"),
    [
        (FULL, Task("ps", 0), ("chief:0", "c:1"), True),
        (FULL, Task("worker", 1), ("chief:0", "c:1"), True),
        (FULL, Task("chief", 0), ("chief:0", "c:1"), False),
        ({**FULL, "evaluator": ("e:1",)}, Task("evaluator", 0), ("chief:0", "c:1"), False),
        ({"worker": ("w:1",), "ps": ("p:1",)}, Task("ps", 0), None, True),
        ({"worker": ("w:1",), "ps": ("p:1",)}, None, None, False),
        ({"worker": ("w:1",)}, Task("worker", 0), ("worker:0", "w:1"), False),
        ({"chief": ("c:1",), "worker": ("w:1",)}, Task("worker", 0), ("chief:0", "c:1"), False),
    ],
)
def test_who_drives_and_who_serves(
    jobs: dict[str, tuple[str, ...]],
    task: Task | None,
    driver: tuple[str, str] | None,
    serving: bool,
) -> None:
    described = Described(jobs, task, "TF_CONFIG")
    assert driver_of(described) == driver
    assert serves(described) == serving
