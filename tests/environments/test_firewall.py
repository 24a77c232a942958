"""The firewall of docs/security.md, on machines of their own: it lets in who is meant."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import namespaces
import pytest
from namespaces import Hosts
from pages import blocks_of

WHY_NOT = namespaces.WHY_NOT or (
    "" if shutil.which("nft") else "nft is not installed (apt-get install nftables)"
)
pytestmark = [
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "-"),
    pytest.mark.timeout(60),
]
SERVER = (
    "import socket\n"
    "server = socket.create_server(('', {port}), family=socket.AF_INET6, dualstack_ipv6=True)\n"
    "print('listens', flush=True)\n"
    "while True:\n    server.accept()[0].close()"
)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with namespaces.hosts(3) as found:
        yield found


def reaches(hosts: Hosts, host: int, address: str, port: int) -> bool:
    code = f"import socket; socket.create_connection(({address!r}, {port}), timeout=2)"
    words = hosts.command(host, sys.executable, "-c", code)
    return subprocess.run(words, capture_output=True).returncode == 0


def test_the_rules_let_the_machines_of_the_job_in(hosts: Hosts, tmp_path: Path) -> None:
    (rules,) = [
        block.text for block in blocks_of("docs/security.md") if block.text.startswith("table")
    ]
    here, job, other = hosts.addresses
    file = tmp_path / "rules"
    file.write_text(rules.replace("10.0.0.4", here).replace("10.0.0.5", job))
    assert other not in file.read_text()
    servers = []
    try:
        for port in (9999, 12430):
            words = hosts.command(0, sys.executable, "-c", SERVER.format(port=port))
            servers.append(subprocess.Popen(words, stdout=subprocess.PIPE, text=True))
            assert servers[-1].stdout is not None
            assert servers[-1].stdout.readline() == "listens\n"
        assert reaches(hosts, 2, here, 12430)  # before
        subprocess.run(hosts.command(0, "nft", "-f", str(file)), check=True)
        assert reaches(hosts, 0, "127.0.0.1", 12430)
        assert reaches(hosts, 1, here, 12430)
        assert not reaches(hosts, 2, here, 12430)
        assert reaches(hosts, 2, here, 9999)  # which is none of its business
    finally:
        for server in servers:
            server.kill()
            server.communicate()
