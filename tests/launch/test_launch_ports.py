"""Ports: free, nobody else's, and still there for the task."""

from __future__ import annotations

import multiprocessing
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from tfdist_ext.errors import LaunchError
from tfdist_ext.launch import ports as ports_module
from tfdist_ext.launch import reserve_ports

pytestmark = pytest.mark.timeout(20)


def _some_ports(count):
    """Ports to fight for; other users of the machine may hold a few of them."""
    with reserve_ports(count) as ports:
        return list(ports)


def _listen(host, port, family=socket.AF_INET):
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.bind((host, port))
    sock.listen()
    return sock


def test_a_task_can_listen_on_a_reserved_port():
    with reserve_ports(3) as ports:
        assert len(set(ports)) == 3
        for port in ports:
            _listen("0.0.0.0", port).close()


def test_the_kernel_gives_none_of_them_to_anybody():
    low, high = ports_module._ephemeral_range()
    outside = [port for port in ports_module._candidates() if not low <= port <= high]
    if len(outside) < 50:
        pytest.skip("this machine's ephemeral range leaves nothing")
    with reserve_ports(50) as ports:
        assert all(not low <= port <= high for port in ports)


@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1", "::1"])
def test_a_port_on_which_somebody_listens_is_passed_over(host):
    taken, free = _some_ports(2)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = _listen(host, taken, family)
    except OSError:
        pytest.skip(f"{host} is no address here")
    with listener, reserve_ports(1, among=[taken, free]) as ports:
        assert ports == (free,)


def test_a_reservation_ends_with_its_block():
    (port,) = _some_ports(1)
    with reserve_ports(1, among=[port]), pytest.raises(LaunchError), reserve_ports(1, among=[port]):
        pass
    with reserve_ports(1, among=[port]) as ports:
        assert ports == (port,)


def test_too_few_ports_says_how_many():
    with (
        pytest.raises(LaunchError, match="ports must be free, got 2; end what uses them"),
        reserve_ports(3, among=_some_ports(2)),
    ):
        pass


def test_threads_that_reserve_at_once_never_share():
    among = _some_ports(60)  # some to spare: other tests may take one meanwhile
    together = threading.Barrier(8)

    def reserve(stack):
        together.wait()
        return stack.enter_context(reserve_ports(5, among=among))

    with ExitStack() as outer, ThreadPoolExecutor(8) as pool:
        stacks = [outer.enter_context(ExitStack()) for _ in range(8)]
        got = [port for ports in pool.map(reserve, stacks) for port in ports]
    assert len(got) == len(set(got)) == 40
    assert set(got) <= set(among)


def _reserve_in_a_process(among, together, pipe):
    together.wait()
    try:
        with reserve_ports(5, among=among) as ports:
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


@pytest.mark.parametrize(
    ("text", "expected", "reason"),
    [
        ("1024\t65535\n", (1024, 65535), "a wide range"),
        (None, (32768, 65535), "no /proc: what Linux and IANA use, together"),
        ("nonsense", (32768, 65535), "not understood: the same"),
    ],
)
def test_the_ephemeral_range(monkeypatch, text, expected, reason):
    def read_text(path, encoding):
        assert path.as_posix() == "/proc/sys/net/ipv4/ip_local_port_range"
        if text is None:
            raise FileNotFoundError(path)
        return text

    monkeypatch.setattr(ports_module.Path, "read_text", read_text)
    assert ports_module._ephemeral_range() == expected, reason
    candidates = ports_module._candidates()
    assert len(candidates) == len(set(candidates)) == 65_536 - 10_000
    low, high = expected
    inside = [low <= port <= high for port in candidates]
    assert inside == sorted(inside), "what the kernel hands out comes last"
