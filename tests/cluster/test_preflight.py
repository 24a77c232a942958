"""Before a cluster starts, its tasks find each other, or each says what is wrong."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from tfdist_ext.cluster import preflight as module
from tfdist_ext.cluster.cards import Card, differences, tasks_of
from tfdist_ext.cluster.preflight import PreflightError, preflight
from tfdist_ext.launch import reserve_ports

pytestmark = pytest.mark.timeout(60)
VERSIONS = {"tensorflow": "2.21.0", "keras": "3.15.1"}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LINGER", 0.3)
    monkeypatch.setattr(module, "_ANSWER", 1.0)


@contextlib.contextmanager
def cluster(**counts: int) -> Iterator[dict[str, tuple[str, ...]]]:
    with reserve_ports(sum(counts.values())) as ports:
        free = iter(ports)
        yield {job: tuple(f"127.0.0.1:{next(free)}" for _ in range(n)) for job, n in counts.items()}


def card(task: str, jobs: Any, gpus: int = 0, **versions: str) -> Card:
    return Card(task, jobs, {**VERSIONS, **versions}, {"GPU": gpus})


def start(
    pool: ThreadPoolExecutor, one: Card, *, wait: float = 20.0, delay: float = 0.0, **show: Any
) -> Future[None]:
    def body() -> None:
        time.sleep(delay)
        preflight(one, wait=wait, **show)

    return pool.submit(body)


def outcomes(cards: list[Card], *delays: float, wait: float = 20.0) -> list[str]:
    """What each task says; "" where it goes."""
    with ThreadPoolExecutor(len(cards)) as pool:
        waits = [*delays, *[0.0] * (len(cards) - len(delays))]
        tasks = [
            start(pool, one, delay=delay, wait=wait)
            for one, delay in zip(cards, waits, strict=True)
        ]
        found = []
        for task in tasks:
            error = task.exception()
            assert error is None or isinstance(error, PreflightError), error
            found.append("" if error is None else str(error))
        return found


def is_free(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, int(port)))
        except OSError:
            return False
    return True


@pytest.mark.parametrize(
    "delays", [(0.0, 0.0, 0.0, 0.0), (1.0, 0.0, 0.5, 0.2), (0.0, 0.8, 0.1, 1.2)]
)
def test_all_go_when_the_last_one_has_come(delays: tuple[float, ...]) -> None:
    with cluster(chief=1, worker=2, ps=1) as jobs:
        begun = time.monotonic()
        cards = [card(task, jobs) for task in tasks_of(jobs)]
        assert outcomes(cards, *delays) == [""] * 4
        assert max(delays) <= time.monotonic() - begun < max(delays) + 2
        assert all(map(is_free, tasks_of(jobs).values()))


def test_one_task_needs_nobody() -> None:
    with cluster(worker=1) as jobs:
        assert outcomes([card("worker:0", jobs)]) == [""]


def test_an_evaluator_is_not_waited_for() -> None:
    with cluster(worker=2, evaluator=1) as jobs:
        assert outcomes([card("worker:0", jobs), card("worker:1", jobs)]) == ["", ""]


def test_who_is_missing_is_named_by_all() -> None:
    with cluster(worker=3) as jobs:
        found = outcomes([card("worker:0", jobs), card("worker:2", jobs)], wait=1.0)
        assert found == [f"no answer from worker:1 ({jobs['worker'][1]})"] * 2
        assert all(map(is_free, jobs["worker"]))
    with cluster(worker=2) as jobs:  # the leader itself
        found = outcomes([card("worker:1", jobs)], wait=0.5)
        assert found == [f"no answer from worker:0 ({jobs['worker'][0]})"]


def test_a_name_that_is_not_known() -> None:
    with cluster(worker=1) as jobs:
        jobs = {"worker": (*jobs["worker"], "no-such-host.invalid:2222")}
        (found,) = outcomes([card("worker:0", jobs)], wait=0.5)
        assert found == (
            "no answer from worker:1 (no-such-host.invalid:2222, whose name is not known)"
        )


def test_a_port_in_use() -> None:
    with cluster(worker=1) as jobs, socket.socket() as other:
        port = int(jobs["worker"][0].rpartition(":")[2])
        other.bind(("127.0.0.1", port))
        other.listen()
        (found,) = outcomes([card("worker:0", jobs)])
        assert found.startswith(f"port {port} of worker:0 must be free, got ")


def other_cluster(jobs: Any) -> Card:
    wrong = {"worker": (*jobs["worker"][:2], "127.0.0.1:1")}
    return card("worker:1", wrong)


@pytest.mark.parametrize(
    ("odd", "said"),
    [
        (other_cluster, "worker:1 was started with another cluster (differs in cluster.worker[2]:"),
        (lambda jobs: card("worker:1", jobs, keras="3.14.0"),
         "worker:1 has keras 3.14.0, and worker:0 has 3.15.1"),
        (lambda jobs: card("worker:1", jobs, gpus=2),
         "worker:1 has 2 GPU devices, and worker:0 has 0: collectives would hang"),
        (lambda jobs: card("worker:2", jobs), "two processes say that they are worker:2"),
    ],
)  # fmt: skip
def test_who_differs_is_named_by_all(odd: Callable[[Any], Card], said: str) -> None:
    with cluster(worker=3) as jobs, contextlib.ExitStack() as stack:
        if "two" in said:  # a copy of the task, on another port of its own
            task = odd(jobs)
            spare = stack.enter_context(cluster(worker=1))["worker"][0]
            stack.enter_context(pytest.MonkeyPatch.context())
            twin = Card(task.task, {"worker": (*jobs["worker"][:2], spare)}, task.versions,
                        task.devices)  # fmt: skip
            found = outcomes([card("worker:0", jobs), task, twin], wait=5.0)
            assert any(said in each or "another cluster" in each for each in found)
            return
        found = outcomes([card("worker:0", jobs), odd(jobs), card("worker:2", jobs)], 0.3)
        assert len(set(found)) == 1
        assert found[0].startswith(said)


@pytest.mark.parametrize("place", [0, 1])
def test_a_task_that_has_started_already_is_not_waited_for(place: int) -> None:
    """TensorFlow's server listens there, which does not speak so."""
    with cluster(worker=2) as jobs:
        host, _, port = jobs["worker"][place].rpartition(":")
        with socket.create_server((host, int(port))) as server:

            def answer() -> None:
                with contextlib.suppress(OSError):
                    while True:
                        connection, _ = server.accept()
                        connection.sendall(b"\x00\x00\x06\x04\x00\x00\x00\x00\x00\n")
                        connection.close()

            threading.Thread(target=answer, daemon=True).start()
            assert outcomes([card(f"worker:{1 - place}", jobs)]) == [""]


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize(
    ("says", "what"),
    [(b"HTTP/1.0 400 Bad request\r\n\r\n", ", where another program answers"), (b"", "")],
    ids=["a web server", "a proxy that closes"],
)
def test_another_program_at_an_address_is_no_task(place: int, says: bytes, what: str) -> None:
    with cluster(worker=2) as jobs:
        address = jobs["worker"][place]
        host, _, port = address.rpartition(":")
        with socket.create_server((host, int(port))) as server:

            def answer() -> None:
                with contextlib.suppress(OSError):
                    while True:
                        connection, _ = server.accept()
                        connection.recv(100)
                        connection.sendall(says)
                        connection.close()

            threading.Thread(target=answer, daemon=True).start()
            (found,) = outcomes([card(f"worker:{1 - place}", jobs)], wait=1.5)
    assert found == f"no answer from worker:{place} ({address}{what})"


@pytest.mark.parametrize("place", [0, 1])
def test_a_frozen_task_is_not_waited_for_until_the_end(
    place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel accepts connections for a process that is stopped; nobody answers them."""
    monkeypatch.setattr(module, "_ANSWER", 0.3)
    monkeypatch.setattr(module, "_SILENCE", 1.5)
    with cluster(worker=3) as jobs:
        address = jobs["worker"][place]
        others = [card(f"worker:{i}", jobs) for i in range(3) if i != place]
        begun = time.monotonic()
        with socket.create_server(("127.0.0.1", int(address.rpartition(":")[2]))):
            found = outcomes(others, wait=30.0)
    said = f"no answer from worker:{place} ({address}, which accepts connections and says nothing"
    assert found == [f"{said}, as a frozen process does)"] * 2
    assert 1.5 <= time.monotonic() - begun < 6


def test_a_leader_that_freezes_while_others_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SILENCE", 1.5)
    with cluster(worker=2) as jobs, ThreadPoolExecutor(1) as pool:
        address = jobs["worker"][0]
        with socket.create_server(("127.0.0.1", int(address.rpartition(":")[2]))) as server:
            follower = start(pool, card("worker:1", jobs))
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b'{"late": [], "tasks": 2}\n')
                error = follower.exception(10)
    assert "which accepts connections and says nothing" in str(error)


def send_card(jobs: Any, **fields: Any) -> socket.socket:
    """A connection to the leader that has sent the card of worker:1, with these fields."""
    own = card("worker:1", jobs)
    message = {"task": "worker:1", "digest": own.digest, "key": "k", "versions": VERSIONS}
    message |= {"devices": {"GPU": 0}, **fields}
    host, _, port = jobs["worker"][0].rpartition(":")
    connection = socket.create_connection((host, int(port)))
    connection.sendall(json.dumps(message).encode() + b"\n")
    return connection


@pytest.mark.parametrize(
    "fields",
    [{"versions": []}, {"devices": None}, {"digest": "x"}, {}],
    ids=["no versions", "no devices", "no cluster", "reset"],
)
def test_a_card_that_is_none_and_a_task_that_is_reset_take_no_name(fields: dict[str, Any]) -> None:
    with cluster(worker=2) as jobs, ThreadPoolExecutor(2) as pool:
        first = start(pool, card("worker:0", jobs))
        time.sleep(0.3)
        with send_card(jobs, **fields) as connection:
            if fields.get("digest"):
                connection.sendall(b'{"cluster": null}\n')
            time.sleep(0.3)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        second = start(pool, card("worker:1", jobs), delay=0.3)
        assert (first.result(), second.result()) == (None, None)


def test_a_slow_name_does_not_make_the_others_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """The leader speaks to those who are there while it still looks for the rest."""
    monkeypatch.setattr(module, "_ANSWER", 0.3)

    async def hangs(*_: Any, **__: Any) -> Any:
        await asyncio.sleep(30)

    with cluster(worker=3) as jobs:
        jobs["worker"] = (*jobs["worker"][:2], "slow.invalid:2222")
        ordinary = asyncio.base_events.BaseEventLoop.getaddrinfo

        async def looked_up(loop: Any, host: str, *args: Any, **named: Any) -> Any:
            lookup = hangs if host == "slow.invalid" else ordinary
            return await lookup(loop, host, *args, **named)

        monkeypatch.setattr(asyncio.base_events.BaseEventLoop, "getaddrinfo", looked_up)
        found = outcomes([card("worker:0", jobs), card("worker:1", jobs)], wait=3.0)
    said = "no answer from worker:2 (slow.invalid:2222, whose name is not known)"
    assert found == [said, said]


def test_rubbish_and_dead_connections_do_no_harm() -> None:
    with cluster(worker=2) as jobs, ThreadPoolExecutor(2) as pool:
        first = start(pool, card("worker:0", jobs))
        host, _, port = jobs["worker"][0].rpartition(":")
        time.sleep(0.3)
        for text in (b"GET / HTTP/1.1\r\n\r\n", b"{}\n", b"[1]\n", b'{"task": 3}\n', b"\xff" * 9):
            with socket.create_connection((host, int(port))) as connection:
                connection.sendall(text)
        second = start(pool, card("worker:1", jobs))
        assert (first.result(), second.result()) == (None, None)


def test_what_is_shown_meanwhile() -> None:
    seen: list[dict[str, str]] = []
    with cluster(worker=3) as jobs, ThreadPoolExecutor(3) as pool:
        tasks = [
            start(pool, card("worker:0", jobs)),
            start(
                pool, card("worker:1", jobs), show=lambda late, tasks: seen.append(dict(late)),
                delay=0.3,
            ),
            start(pool, card("worker:2", jobs), delay=2.0),  # the machine may be busy meanwhile
        ]  # fmt: skip
        for task in tasks:
            task.result()
    assert {"worker:2": "waiting"} in seen


def test_a_task_knows_nothing_of_the_others_before_the_leader_is_there() -> None:
    seen: list[dict[str, str]] = []
    with cluster(worker=3) as jobs:
        mine = card("worker:1", jobs)
        with pytest.raises(PreflightError) as caught:
            preflight(mine, wait=0.5, show=lambda late, tasks: seen.append(dict(late)))
    assert seen[-1] == {"worker:0": "waiting", "worker:2": "unknown"}
    assert str(caught.value) == f"no answer from worker:0 ({jobs['worker'][0]})"


@pytest.mark.long
def test_a_thousand_tasks_take_seconds() -> None:
    """In one process: what is counted is what they say to each other."""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 65_536), most))
    try:
        with cluster(worker=1000) as jobs:

            async def body() -> None:
                tasks = [card(task, jobs) for task in tasks_of(jobs)]
                await asyncio.gather(
                    *(module._preflight(one, 120.0, lambda late, n: None) for one in tasks)
                )

            begun = time.monotonic()
            asyncio.run(body())
            assert time.monotonic() - begun < 30
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))


def test_differences() -> None:
    jobs = {"worker": ("a:1", "b:1")}
    mine = card("worker:0", jobs)
    assert differences(mine, card("worker:1", jobs)) == []
    fewer = {"worker": ("a:1",)}
    assert differences(mine, card("worker:1", fewer)) == [
        "worker:1 was started with another cluster (differs in cluster.worker: 1 tasks, not 2)"
    ]
    with_ps = {"chief": ("c:1",), "worker": ("a:1",), "ps": ("p:1",)}
    assert differences(card("chief:0", with_ps), card("worker:0", with_ps, gpus=4)) == []
    older = Card("worker:1", jobs, {"tensorflow": "2.21.0"}, {})
    assert differences(mine, older) == ["worker:1 has keras none, and worker:0 has 3.15.1"]
