"""A checkpoint folder has one writer: the job that opened it last.

Each job that trains into a folder takes the next generation: it creates `owner-00007.json`
exclusively, which is atomic on network file systems too, where locks often are not. An owner
checks before each write, rename and delete that no newer generation is there. A job that was
stopped between its check and its rename cannot be held back by any check, so in addition nothing
that it may still do destroys a newer job's files: see `checkpoint_folder`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import time
import uuid
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tfdist_ext.errors import TrainingError
from tfdist_ext.training.saving.complete_files import create_exclusively, replaced_when_complete

__all__ = ["FolderTakenError", "Owner", "claim", "newest_owner"]

_OWNER = re.compile(r"owner-(\d{5,})\.json")


class FolderTakenError(TrainingError):
    """A newer job writes to the checkpoint folder; this one stopped before it changed anything."""


@dataclass(frozen=True)
class Owner:
    """A job that writes to a checkpoint folder.

    Attributes:
        generation: how many jobs have opened the folder, this one included.
        id: of this `fit` alone.
        host: its machine's name.
        machine: what tells one boot and one container of that machine from another.
        pid: its process.
        started: when the process started, in the system's own unit, as pids are used again.
        since: when it opened the folder, in seconds since 1970.
        training: whose checkpoints these are; jobs that resume a training keep its id.
        ended: it has said that it will not write any more.
    """

    generation: int
    id: str = ""
    host: str = ""
    machine: str = ""
    pid: int = 0
    started: str = ""
    since: float = 0.0
    training: str = ""
    ended: bool = False

    def __str__(self) -> str:
        if not self.id:
            return f"a job whose record {_file_of(self.generation)} cannot be read"
        since = time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(self.since))
        return f"host {self.host}, process {self.pid}, since {since}"

    def may_be_running(self) -> bool:
        """False where the job has ended, was killed, or is an earlier fit of this process."""
        if self.ended or not self.id:
            return False
        boot, container = _machine()
        if self.machine == f"{boot} {container}":
            return self.pid != os.getpid() and _started(self.pid) == self.started
        rebooted = self.host == socket.gethostname() and self.machine.split(" ")[0] != boot
        return not rebooted  # nothing can be known of processes on other machines

    def check(self, folder: Path) -> None:
        """Pass if this job may still write.

        Raises:
            FolderTakenError: a newer job has opened the folder.
        """
        newest = newest_owner(folder)
        if newest is None:  # somebody has emptied the folder
            folder.mkdir(parents=True, exist_ok=True)
            if _create(folder, self):
                return
            newest = newest_owner(folder)
        if newest is None or newest.generation < self.generation or newest.id == self.id:
            return
        if newest.id or newest.generation > self.generation:
            raise FolderTakenError(
                f"checkpoint_dir must have one writer, and a newer job has taken over {folder}:"
                f" {newest}. This job stops before it writes there again, and the checkpoints of"
                " the newer one stay. Give each training a checkpoint_dir of its own."
            )

    def update(self, folder: Path, *, training: str | None = None, ended: bool = False) -> Owner:
        """Write this owner's record anew.

        Raises:
            FolderTakenError: a newer job has opened the folder.
        """
        self.check(folder)
        updated = replace(self, training=training or self.training, ended=ended)
        # No other job ever writes a file of this generation.
        with replaced_when_complete(folder / _file_of(self.generation)) as unfinished:
            unfinished.write_text(json.dumps(asdict(updated)), encoding="utf-8")
        return updated


def claim(folder: Path, *, after: int = 0) -> tuple[Owner, Owner | None]:
    """(this job as the newest owner of the folder, the owner before it).

    Args:
        after: a generation that is known to have been, where its record may be lost.

    Raises:
        OSError: no file can be created in the folder.
    """
    while True:
        before = newest_owner(folder)
        generation = max(after, before.generation if before else 0) + 1
        boot, container = _machine()
        owner = Owner(
            generation,
            id=uuid.uuid4().hex,
            host=socket.gethostname(),
            machine=f"{boot} {container}",
            pid=os.getpid(),
            started=_started(os.getpid()),
            since=time.time(),
            training=before.training if before else "",
        )
        # One that is removed as old, by a job that came meanwhile, can be created twice.
        if _create(folder, owner) and newest_owner(folder) == owner:
            break
    for older in _generations(folder):
        if older < generation:
            (folder / _file_of(older)).unlink(missing_ok=True)
    return owner, before


def newest_owner(folder: Path) -> Owner | None:
    """The owner of the highest generation; None where no job has opened the folder."""
    newest = max(_generations(folder), default=None)
    if newest is None:
        return None
    try:
        read = json.loads((folder / _file_of(newest)).read_text(encoding="utf-8"))
        return replace(Owner(**read), generation=newest)
    except FileNotFoundError:  # a newer one has come
        return newest_owner(folder)
    except (OSError, ValueError, TypeError):
        return Owner(newest)


def _file_of(generation: int) -> str:
    return f"owner-{generation:05d}.json"


def _create(folder: Path, owner: Owner) -> bool:
    """Create the owner's record; False where another job has created one of this generation."""
    path = folder / _file_of(owner.generation)
    return create_exclusively(path, json.dumps(asdict(owner)), name=owner.id)


def _generations(folder: Path) -> list[int]:
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    return [int(match[1]) for name in names if (match := _OWNER.fullmatch(name))]


def _machine() -> tuple[str, str]:
    """(this boot of this machine, this container in it); empty where the system has no /proc."""
    boot = container = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        container = os.readlink("/proc/self/ns/pid")
    return boot, container


def _started(pid: int) -> str:
    """When a process started, in clock ticks since the boot; empty where there is none such."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    state, *fields = stat.rpartition(")")[2].split()  # the name before it may contain anything
    return "" if state in "ZX" else fields[18]
