"""Ports: free, nobody else's, and still there for the task."""

from __future__ import annotations

import re
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tfdist_ext import cli
from tfdist_ext.errors import LaunchError
from tfdist_ext.launcher import resources as ports_module
from tfdist_ext.launcher.resources import gpus_of, reserve_ports

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
def test_port_in_use_is_not_reserved(among, host):
    taken, free = _some_ports(2)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, taken), family=family)
    except OSError:
        pytest.skip(f"{host} is no address here")
    among([taken, free])
    with listener, reserve_ports(1) as ports:
        assert ports == (free,)


def test_reservation_ends_with_its_block(among):
    (port,) = _some_ports(1)
    among([port])
    message = "only 0 of 1 ports are free. End the programs that use them"
    with reserve_ports(1), pytest.raises(LaunchError, match=message), reserve_ports(1):
        pass
    with reserve_ports(1) as ports:
        assert ports == (port,)


def test_concurrent_reservations_are_disjoint(among):
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


def test_each_worker_gets_one_gpu(capfd) -> None:
    """Each worker sees one of the GPUs that this process sees."""
    run = ["run", "--process-per-device", "--dry-run"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8f,GPU-9a")
        for options, gpus in (([], ["GPU-8f", "GPU-9a"]), (["--workers", "1"], ["GPU-8f"])):
            assert cli.main([*run, *options, "--", "true"]) == 0
            found = re.findall(r"CUDA_VISIBLE_DEVICES=(\S+)", capfd.readouterr().out)
            assert [name for name in found if name.startswith("GPU")] == gpus
        for workers in (0, 3):
            assert cli.main([*run, "--workers", str(workers), "--", "true"]) == 2
            assert f"an integer from 1 to 2, got {workers}" in capfd.readouterr().err
        patch.setenv("CUDA_VISIBLE_DEVICES", "-1")
        assert cli.main([*run, "--", "true"]) == 2
        assert "needs GPUs, and this machine has none" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("visible", "gpus"),
    [("0, 2", ["0", "2"]), ("", []), ("-1", []), ("1,-1,0", ["1"]), ("GPU-8f", ["GPU-8f"])],
)
def test_gpus_come_from_cuda_visible_devices(visible: str, gpus: list[str]) -> None:
    assert gpus_of({"CUDA_VISIBLE_DEVICES": visible, "PATH": "/nowhere"}) == gpus


def test_gpus_come_from_nvidia_smi(tmp_path: Path) -> None:
    assert gpus_of({"PATH": str(tmp_path)}) == []
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 0\necho 1\n")
    program.chmod(0o755)
    assert gpus_of({"PATH": str(tmp_path)}) == ["0", "1"]
    program.write_text("#!/bin/sh\nexit 9\n")
    with pytest.raises(LaunchError, match=r"nvidia-smi failed.*exit status 9"):
        gpus_of({"PATH": str(tmp_path)})
