"""A network of this process's own: nothing from outside reaches a port of it, or of a child."""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import sys
from pathlib import Path

from tfdist_ext.errors import LaunchError

__all__ = ["enter_own_network"]

# Of Linux's <sched.h> and <linux/sockios.h>.
_NEW_USER, _NEW_NET = 0x1000_0000, 0x4000_0000
_SET_FLAGS, _UP = 0x8914, 1


def enter_own_network() -> None:
    """Move this process, and all that it starts, into a network namespace with loopback alone.

    Who may not make one (other than root, as a rule) makes a user namespace for it, with the same
    user and group, so that files belong to whom they did.

    Raises:
        LaunchError: the system does not allow it.
    """
    if not sys.platform.startswith("linux"):
        raise LaunchError(
            f"--isolate must have Linux's network namespaces, got {sys.platform}; leave it out, and"
            " close the ports by a firewall"
        )
    user, group = os.geteuid(), os.getegid()
    try:
        try:
            _unshare(_NEW_NET)
        except PermissionError:
            _unshare(_NEW_USER | _NEW_NET)
            Path("/proc/self/uid_map").write_text(f"{user} {user} 1", encoding="ascii")
            Path("/proc/self/setgroups").write_text("deny", encoding="ascii")
            Path("/proc/self/gid_map").write_text(f"{group} {group} 1", encoding="ascii")
        _bring_loopback_up()
    except OSError as error:
        raise LaunchError(
            f"--isolate must be allowed to make a network namespace, got {error}; start it as root,"
            " allow user namespaces (sysctl user.max_user_namespaces=10000; on Debian"
            " kernel.unprivileged_userns_clone=1, on Ubuntu"
            " kernel.apparmor_restrict_unprivileged_userns=0; in a container --cap-add SYS_ADMIN),"
            " or leave it out, and close the ports by a firewall"
        ) from error


def _unshare(flags: int) -> None:
    """os.unshare, which Python has since 3.12."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(flags):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _bring_loopback_up() -> None:
    """`ip link set lo up`, by this process, which has the right to do it until it starts others."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sH22x", b"lo", _UP))
