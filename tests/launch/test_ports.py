"""Ports: free, nobody else's, and still there for the task."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor

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


def test_launchers_that_reserve_at_once_never_share(among):
    # Both begin with the first port, so they meet. Other tests may take some of them meanwhile.
    ports = _some_ports(60)
    among(ports)
    together = threading.Barrier(2)

    def reserve(_: int) -> tuple[int, ...]:
        together.wait()
        with reserve_ports(5) as mine:
            together.wait()  # hold them until the other has its ports
            return mine

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(reserve, range(2))
    assert len({*first, *second}) == 10
    assert {*first, *second} <= set(ports)
