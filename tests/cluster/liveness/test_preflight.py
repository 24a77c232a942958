"""Before a cluster starts, its tasks find each other, or each reports what is wrong."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from tfdist_ext.cluster.jobs import addresses_of
from tfdist_ext.cluster.liveness import preflight as module
from tfdist_ext.cluster.liveness.preflight import (
    PreflightError,
    TaskInfo,
    differences,
    preflight,
)
from tfdist_ext.cluster.liveness.wire import READY, Connection, Endpoint, port_is_free
from tfdist_ext.launcher.resources import reserve_ports

pytestmark = pytest.mark.timeout(60)
VERSIONS = {"tensorflow": "2.21.0", "keras": "3.15.1"}


@contextlib.contextmanager
def cluster(**counts: int) -> Iterator[dict[str, tuple[str, ...]]]:
    with reserve_ports(sum(counts.values())) as ports:
        free = iter(ports)
        yield {job: tuple(f"127.0.0.1:{next(free)}" for _ in range(n)) for job, n in counts.items()}


def info(task: str, jobs: Any, gpus: int = 0, **versions: str) -> TaskInfo:
    return TaskInfo(task, jobs, {**VERSIONS, **versions}, gpus)


def outcomes(infos: list[TaskInfo], *delays: float, wait: float = 20.0) -> list[str]:
    """The error of each task; "" where it may start."""

    def run(one: TaskInfo, delay: float) -> str:
        time.sleep(delay)
        try:
            preflight(one, wait=wait, source="a test").free_port()
        except PreflightError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(infos)) as pool:
        waits = [*delays, *[0.0] * (len(infos) - len(delays))]
        return list(pool.map(run, infos, waits))


def test_all_tasks_start_after_the_last_one_reports() -> None:
    delays = (0.5, 0.0, 1.0)  # worker:0, which leads, comes neither first nor last
    with cluster(chief=1, worker=2, ps=1, evaluator=1) as jobs:  # nobody waits for the evaluator
        begun = time.monotonic()
        assert outcomes([info(task, jobs) for task in addresses_of(jobs)], *delays) == [""] * 4
        assert max(delays) <= time.monotonic() - begun < max(delays) + 6
        ports = [int(address.rpartition(":")[2]) for address in addresses_of(jobs).values()]
        assert all(map(port_is_free, ports))


def test_all_tasks_name_the_missing_task() -> None:
    with cluster(worker=3) as jobs:
        found = outcomes([info("worker:0", jobs), info("worker:2", jobs)], wait=0.5)
        assert found == [f"no answer from worker:1 ({jobs['worker'][1]})"] * 2
    with cluster(worker=2) as jobs:  # the leader itself
        found = outcomes([info("worker:1", jobs)], wait=0.5)
        assert found == [f"no answer from worker:0 ({jobs['worker'][0]})"]


def test_unknown_host_and_port_in_use_are_errors() -> None:
    with cluster(worker=1) as jobs:
        jobs = {"worker": (*jobs["worker"], "no-such-host.invalid:2222")}
        (found,) = outcomes([info("worker:0", jobs)], wait=1.0)
        assert found == (
            "no answer from worker:1 (no-such-host.invalid:2222, whose host is unknown)"
        )
        address = jobs["worker"][0]
        with socket.create_server(("", int(address.rpartition(":")[2]))):
            (found,) = outcomes([info("worker:0", jobs)])
    assert found.startswith(f"the port of worker:0 ({address}) is in use")


@contextlib.contextmanager
def task_at(address: str, key: str) -> Iterator[None]:
    """What answers at the address of a task that has not reported yet."""
    endpoint = Endpoint(address, lambda message: {"key": key})
    try:
        yield
    finally:
        endpoint.close()


def test_restarted_task_may_answer_before_its_report() -> None:
    with cluster(worker=3) as jobs, ThreadPoolExecutor() as pool:
        leader, first, again = (info(f"worker:{n}", jobs) for n in (0, 1, 1))
        started = pool.submit(outcomes, [leader])
        with task_at(jobs["worker"][1], first.key):  # reports, and is killed
            report = {**vars(first), "jobs": dict(jobs)}
            connection = Connection(jobs["worker"][0])
            while connection.ask(report, 1.0)[0] != READY:
                time.sleep(0.02)
        with task_at(jobs["worker"][1], again.key):  # has not reported yet
            time.sleep(0.8)
        assert outcomes([again, info("worker:2", jobs)]) == ["", ""]
        assert started.result() == [""]


def test_another_process_at_the_address_of_a_task_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_LINGER", 0.5)
    with cluster(worker=2) as jobs:
        address = jobs["worker"][1]
        leader = module._Leader(info("worker:0", jobs), addresses_of(jobs))
        leader.answer({**vars(info("worker:1", jobs)), "jobs": dict(jobs)})
        with task_at(address, "another"), pytest.raises(PreflightError, match=address):
            leader.wait_for_all(time.monotonic() + 20.0, "a test")


def test_two_processes_as_one_task_are_an_error() -> None:
    jobs = {"worker": ("a:1", "b:2")}
    leader = module._Leader(info("worker:0", jobs), addresses_of(jobs))
    reports = [{**vars(info("worker:1", jobs)), "jobs": jobs} for _ in range(2)]
    for report in (reports[0], reports[1], reports[1]):
        leader.answer(report)
    assert not leader._errors
    leader.answer(reports[0])
    assert [*leader._errors] == ["two processes were started as worker:1"]


def test_all_tasks_name_the_task_that_differs() -> None:
    with cluster(worker=3) as jobs:
        others = info("worker:1", jobs, keras="3.14.0"), info("worker:2", jobs)
        error = "worker:1 has keras 3.14.0, and worker:0 has 3.15.1"
        assert outcomes([info("worker:0", jobs), *others], 0.3) == [error] * 3


@pytest.mark.parametrize(
    ("other", "error"),
    [
        (info("worker:1", {"worker": ("a:1", "b:2", "d:4")}),
         "worker:1 was started with a different cluster (worker:2 at d:4, not c:3)"),
        (info("worker:1", {"worker": ("a:1", "b:2")}),
         "worker:1 was started with a different cluster (worker:2 at c:3 is only in that"
         " of worker:0)"),
        (info("worker:1", {"worker": ("a:1", "b:2", "c:3", "d:4")}),
         "worker:1 was started with a different cluster (worker:3 at d:4 is only in that"
         " of worker:1)"),
        (info("worker:1", {"worker": ("a:1", "b:2", "c:3")}, gpus=2),
         "worker:1 has 2 GPU devices, and worker:0 has 0: collectives would hang"),
    ],
)  # fmt: skip
def test_differences_between_tasks_are_described(other: TaskInfo, error: str) -> None:
    leader = info("worker:0", {"worker": ("a:1", "b:2", "c:3")})
    assert differences(leader, other) == [error]


@contextlib.contextmanager
def program_at(address: str, reply: bytes | None) -> Iterator[None]:
    """A program that sends the same to each connection, and closes it; None: accepts, no more."""
    with socket.create_server(("127.0.0.1", int(address.rpartition(":")[2]))) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while reply is not None:
                    connection, _ = server.accept()
                    connection.recv(100)
                    connection.sendall(reply)
                    connection.close()

        threading.Thread(target=serve, daemon=True).start()
        yield


@pytest.mark.parametrize(
    ("place", "reply", "why"),
    [
        (0, b"HTTP/1.0 400 Bad request\r\n\r\n", ", where another program answers"),
        (1, None, ", which does not answer: is its process frozen?"),
    ],
    ids=["a web server", "a frozen process"],
)
def test_other_program_at_an_address_is_not_a_task(
    place: int, reply: bytes | None, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_ASK", 0.5)
    with cluster(worker=2) as jobs:
        address = jobs["worker"][place]
        with program_at(address, reply):
            (found,) = outcomes([info(f"worker:{1 - place}", jobs)], wait=1.0)
    assert found == f"no answer from worker:{place} ({address}{why})"


def test_other_grpc_server_at_an_address_is_not_a_task() -> None:
    with cluster(worker=2) as jobs:
        server = grpc.server(ThreadPoolExecutor(1))
        server.add_insecure_port(jobs["worker"][1])
        server.start()
        (found,) = outcomes([info("worker:0", jobs)], wait=1.0)
        server.stop(0).wait()
    at = jobs["worker"][1]
    assert found == f"no answer from worker:1 ({at}, where another program answers)"
