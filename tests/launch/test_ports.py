"""Ports: free, nobody else's, and still there for the task."""

from __future__ import annotations

import multiprocessing
import socket
from pathlib import Path

import pytest

from tfdist_ext.errors import LaunchError
from tfdist_ext.launch import ports as ports_module
from tfdist_ext.launch.ports import reserve_ports

pytestmark = pytest.mark.timeout(20)


@pytest.fixture
def among(monkeypatch):
    """Lets `reserve_ports` choose among a few ports only, in this order."""

    def choose(ports):
        monkeypatch.setattr(ports_module, "_candidates", lambda: ports)

    return choose


def _some_ports(count):
    """Ports to fight for; other users of the machine may hold a few of them."""
    with reserve_ports(count) as ports:
        return list(ports)


def test_the_kernel_gives_none_of_them_to_anybody():
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    outside = [port for port in ports_module._candidates() if not low <= port <= high]
    if len(outside) < 50:
        pytest.skip("this machine's ephemeral range leaves nothing")
    with reserve_ports(50) as ports:
        assert all(not low <= port <= high for port in ports)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_port_on_which_somebody_listens_is_passed_over(among, host):
    taken, free = _some_ports(2)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, taken), family=family)
    except OSError:
        pytest.skip(f"{host} is no address here")
    among([taken, free])
    with listener, reserve_ports(1) as ports:
        assert ports == (free,)


def test_a_reservation_ends_with_its_block(among):
    (port,) = _some_ports(1)
    among([port])
    message = "1 ports must be free, got 0; end what uses them"
    with reserve_ports(1), pytest.raises(LaunchError, match=message), reserve_ports(1):
        pass
    with reserve_ports(1) as ports:
        assert ports == (port,)


def _reserve_in_a_process(among, together, pipe):
    ports_module._candidates = lambda: among
    together.wait()
    try:
        with reserve_ports(5) as ports:
            pipe.send(ports)
            pipe.recv()  # hold them until the test has seen all
    except LaunchError as error:
        pipe.send(error)


def test_processes_that_reserve_at_once_never_share():
    context = multiprocessing.get_context("spawn")
    # Both begin with the first, so they meet however many there are to spare, and other tests may
    # take some of them meanwhile (of 14 too few were left, once).
    among = _some_ports(60)
    together = context.Barrier(2)
    pipes = [context.Pipe() for _ in range(2)]
    processes = [
        context.Process(target=_reserve_in_a_process, args=(among, together, there), daemon=True)
        for _, there in pipes
    ]
    for process in processes:
        process.start()
    answers = [here.recv() for here, _ in pipes]
    for here, _ in pipes:
        here.send("done")
    for process in processes:
        process.join()
    for here, there in pipes:
        here.close()
        there.close()
    assert not [answer for answer in answers if isinstance(answer, LaunchError)]
    got = [port for ports in answers for port in ports]
    assert len(set(got)) == len(got) == 10
    assert set(got) <= set(among)
