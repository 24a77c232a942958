"""The folder of `fit(checkpoint_dir=...)`: its checkpoints, and the job that owns it.

The list of checkpoints is the list of file names: `epoch-00003.safetensors`, and in the middle of
an epoch `epoch-00003-batch-00000120.safetensors`. A file appears when it is complete.

`owner.json` names the job that opened the folder last. A job reads `owner.json` before each change,
and stops with an error if the file names another job. The file also says whether the training is
done.
"""

from __future__ import annotations

import contextlib
import json
import os
import posixpath
import re
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tfdist_ext.errors import TrainingError
from tfdist_ext.training.checkpoints.format import (
    CheckpointFile,
    Content,
    DamagedCheckpointError,
    Progress,
    encode_checkpoint,
)
from tfdist_ext.training.checkpoints.paths import (
    atomic_write,
    error_if_unwritable,
    names_in,
    open_file,
    os_errors,
    remove,
    rename,
)
from tfdist_ext.user_frames import filter_traceback, warn

__all__ = [
    "CheckpointFolder",
    "FolderTakenError",
    "Owner",
    "checkpoints_in",
    "finished_checkpoints",
    "name_of",
    "owner_of",
    "training_is_done",
]

KEPT = 3

SUFFIX = ".safetensors"

OWNER = "owner.json"

# A callback may write other files into the folder, such as `epoch-01.weights.h5`.
_CHECKPOINT = re.compile(rf"epoch-(\d{{5,}})(?:-batch-(\d{{8,}}))?{re.escape(SUFFIX)}")

_UNFINISHED = re.compile(r"\.(epoch-\d.*|owner\.json)\.[0-9a-f]{32}\.unfinished")


class FolderTakenError(TrainingError):
    """Another job opened the checkpoint folder later; this one stops before it changes anything."""


def name_of(progress: Progress) -> str:
    """Returns the name of a checkpoint."""
    middle = f"-batch-{progress.batches:08d}" if progress.batches else ""
    return f"epoch-{progress.epoch:05d}{middle}{SUFFIX}"


def checkpoints_in(folder: str) -> list[str]:
    """Returns the names of the checkpoints in a folder, the oldest first."""
    matches = [match for match in map(_CHECKPOINT.fullmatch, names_in(folder)) if match]
    return [match[0] for match in sorted(matches, key=lambda m: (int(m[1]), int(m[2] or 0)))]


@filter_traceback
def finished_checkpoints(directory: str | os.PathLike[str]) -> list[Path]:
    """Returns the checkpoints of `fit(checkpoint_dir=directory)`, the oldest first.

    Old ones are removed while the training runs: the last three stay. For a folder in a remote
    store the paths are strings.
    """
    folder = os.fspath(directory)
    join: Callable[[str, str], Any] = posixpath.join if "://" in folder else Path
    return [join(folder, name) for name in checkpoints_in(folder)]


@filter_traceback
def training_is_done(directory: str | os.PathLike[str]) -> bool:
    """Returns whether the `fit` that saves to `directory` has completed."""
    owner = owner_of(os.fspath(directory))
    return owner is not None and owner.epochs_when_done is not None


@dataclass(frozen=True)
class Owner:
    """The job that writes to a checkpoint folder.

    Attributes:
        id: of this `fit` alone.
        host: name of its machine.
        pid: its process.
        since: when it opened the folder, in seconds since 1970.
        epochs_when_done: the `epochs` of the `fit`, once that has completed.
        last: the checkpoint from which a job that is started again gets the final state; None if
            the last epoch was not saved, because its loss was not finite.
    """

    id: str
    host: str
    pid: int
    since: float
    epochs_when_done: int | None = None
    last: str | None = None

    @classmethod
    def this_job(cls) -> Owner:
        return cls(uuid.uuid4().hex, socket.gethostname(), os.getpid(), time.time())

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(self.since))
        return f"host {self.host}, process {self.pid}, since {since}"

    def is_done_after(self, epochs: int) -> bool:
        """Returns whether a training of this many epochs has completed."""
        return self.epochs_when_done is not None and self.epochs_when_done >= epochs


def owner_of(folder: str) -> Owner | None:
    """Returns the job that opened a folder last; None if no job has, or if its file is damaged."""
    path = posixpath.join(folder, OWNER)
    try:
        with os_errors(path), open_file(path) as file:
            return Owner(**json.loads(file.read()))
    except (FileNotFoundError, ValueError, TypeError):
        return None


class CheckpointFolder:
    """A checkpoint folder, on the chief.

    Attributes:
        path: of the folder.
        newest: the checkpoint from which this job resumes, and later the one written last; None
            if there is none.
        progress: of that checkpoint.
        complete_after: epochs of the training, if that is done; this job changes nothing then.
    """

    def __init__(self, path: str):
        self.path = path
        self.newest: str | None = None
        self.progress = Progress()
        self.complete_after: int | None = None
        self._owner = Owner.this_job()

    def file(self, name: str) -> str:
        """Returns the path of a file in the folder."""
        return posixpath.join(self.path, name)

    def open(self, epochs: int) -> None:
        """Finds the newest complete checkpoint, and becomes the owner of the folder.

        A folder whose training is complete is only read: it may be an archive.

        Args:
            epochs: of the whole training.

        Raises:
            TrainingError: the folder cannot be written, or it has checkpoints and none is
                complete.
        """
        with error_if_unwritable(self.path, "checkpoint_dir"):
            before = owner_of(self.path)
            if before is not None and before.is_done_after(epochs) and before.last is not None:
                # The file may be damaged, or removed.
                with contextlib.suppress(TrainingError):
                    self._take(before.last)
                    self.complete_after = before.epochs_when_done
                    return
            self._write_owner()
            for name in filter(_UNFINISHED.fullmatch, names_in(self.path)):
                remove(self.file(name))
            self._find_newest()

    def write(self, content: Content, wrote: Callable[[], object] = lambda: None) -> None:
        """Writes a checkpoint, and removes old ones.

        Args:
            wrote: called after each block of the file.

        Raises:
            FolderTakenError: another job has opened the folder.
            TrainingError: the file cannot be written, for example because the disk is full.
        """
        name = name_of(content.progress)
        with self._writing(name):
            with atomic_write(self.file(name), self._unfinished(name), self._check_owner) as write:
                encode_checkpoint(write, content, wrote)
            self.newest, self.progress = name, content.progress
            for old in checkpoints_in(self.path)[:-KEPT]:
                self._check_owner()
                remove(self.file(old))

    def finish(self, epochs: int, *, saved: bool) -> None:
        """Notes that the training has completed.

        Args:
            epochs: of the whole training.
            saved: the last epoch was saved.
        """
        last = self.newest if saved else None
        self._owner = replace(self._owner, epochs_when_done=epochs, last=last)
        with self._writing(OWNER):
            self._write_owner()

    def _find_newest(self) -> None:
        """Finds the newest complete checkpoint; renames the damaged ones that are newer."""
        damaged: dict[str, DamagedCheckpointError] = {}
        for name in reversed(checkpoints_in(self.path)):
            try:
                self._take(name)
                break
            except DamagedCheckpointError as error:
                damaged[name] = error
        if damaged and self.newest is None:
            raise TrainingError(
                f"{self.path} has no complete checkpoint:"
                f" {' '.join(str(error) for error in damaged.values())} Move these files away to"
                " start the training again, or use another folder."
            )
        for name, reason in damaged.items():
            aside = f"{name.removesuffix(SUFFIX)}.damaged"
            warn(f"{reason} It is renamed to {aside}, and the training resumes from {self.newest}.")
            self._check_owner()
            rename(self.file(name), self.file(aside))

    def _take(self, name: str) -> None:
        with CheckpointFile(self.file(name)) as file:
            file.verify()
            self.newest, self.progress = name, file.progress

    @contextlib.contextmanager
    def _writing(self, name: str) -> Iterator[None]:
        """Scope in which a file is written, if this job may write."""
        try:
            self._check_owner()
            yield
        except OSError as error:
            with contextlib.suppress(OSError):
                self._check_owner()  # a newer job removes what this one has not finished
            stays = f"The last complete checkpoint is {self.newest}." if self.newest else ""
            raise TrainingError(
                f"{name} could not be written to {self.path}: {error.strerror or error}. {stays}"
                " Free disk space or correct the permissions of checkpoint_dir, and run the job"
                " again."
            ) from error

    def _check_owner(self) -> None:
        """Passes if this job may write.

        Raises:
            FolderTakenError: another job has opened the folder.
        """
        newest = owner_of(self.path)
        if newest is None:  # the folder was emptied
            with error_if_unwritable(self.path, "checkpoint_dir"):
                self._write_owner()
        elif newest.id != self._owner.id:
            raise FolderTakenError(
                f"Another job writes to {self.path}: {newest}. This job stops and changes nothing"
                " there. Give each training its own checkpoint_dir."
            )

    def _write_owner(self) -> None:
        text = json.dumps(asdict(self._owner), indent=1)
        with atomic_write(self.file(OWNER), self._unfinished(OWNER)) as write:
            write(memoryview(text.encode()))

    def _unfinished(self, name: str) -> str:
        return self.file(f".{name}.{self._owner.id}.unfinished")
