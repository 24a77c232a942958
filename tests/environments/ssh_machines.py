"""Machines that one reaches by ssh: real sshd processes, each on a loopback address of its own."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SSHD = shutil.which("sshd") or "/usr/sbin/sshd"
# Why there are none here; "" where there are.
WHY_NOT = "" if os.path.exists(SSHD) else "sshd is not installed (apt-get install openssh-server)"


@dataclass
class Machines:
    """A few sshd.

    Attributes:
        ssh: the command that reaches them, for --ssh.
        addresses: of each.
        servers: the process of each.
    """

    ssh: str
    addresses: tuple[str, ...]
    servers: list[subprocess.Popen[bytes]]

    def connections(self, machine: int) -> list[int]:
        """The sshd processes that serve connections to a machine."""
        return _below(self.servers[machine].pid)

    def cut(self, machine: int) -> None:
        """End its sshd, and every connection to it, at once."""
        pids = [self.servers[machine].pid, *self.connections(machine)]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                if Path(f"/proc/{pid}/comm").read_text().startswith("sshd"):
                    os.kill(pid, signal.SIGKILL)


def _below(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [each for child in map(int, children) for each in (child, *_below(child))]


@contextlib.contextmanager
def ssh_machines(folder: Path, count: int) -> Iterator[Machines]:
    """So many machines, which all share this one's files."""
    folder.chmod(0o700)
    for name in ("host", "user"):
        key = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(key, check=True, timeout=20)
    (folder / "authorized").write_text((folder / "user.pub").read_text())
    (folder / "authorized").chmod(0o600)
    if not os.geteuid():
        Path("/run/sshd").mkdir(exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    addresses = tuple(f"127.0.0.{machine + 2}" for machine in range(count))
    settings = {
        "HostKey": folder / "host",
        "AuthorizedKeysFile": folder / "authorized",
        "StrictModes": "no",
        "UsePAM": "no",
        "PidFile": "none",
        "PermitRootLogin": "prohibit-password",
        "PasswordAuthentication": "no",
        "Port": port,
    }
    servers = []
    try:
        for machine, address in enumerate(addresses):
            config = folder / f"sshd{machine}"
            lines = {**settings, "ListenAddress": address}
            config.write_text("".join(f"{key} {value}\n" for key, value in lines.items()))
            command = [SSHD, "-D", "-e", "-f", str(config)]
            with open(folder / f"log{machine}", "wb") as log:
                servers.append(subprocess.Popen(command, stderr=log))
        for address in addresses:
            _wait_for(address, port)
        client = folder / "client"
        client.write_text(
            f"Port {port}\nUser {getpass.getuser()}\nIdentityFile {folder}/user\n"
            f"IdentitiesOnly yes\nUserKnownHostsFile {folder}/known\n"
            "StrictHostKeyChecking accept-new\nLogLevel ERROR\n"
        )
        yield Machines(f"ssh -F {client}", addresses, servers)
    finally:
        for server in servers:
            server.kill()
            server.wait()


def _wait_for(address: str, port: int) -> None:
    deadline = time.monotonic() + 20
    while True:
        try:
            socket.create_connection((address, port), 2).close()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return
