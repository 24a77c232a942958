"""The folder of `fit(checkpoint_dir=...)`: its checkpoints, and the job that owns it.

The list of checkpoints is the list of file names: `epoch-00003.safetensors`, and in the middle of
an epoch `epoch-00003-batch-00000120.safetensors`. A file appears when it is complete.

`owner.json` names the job that opened the folder last. A job reads `owner.json` before each change,
and stops with an error if the file names another job. The file also says whether the training is
done.
"""

from __future__ import annotations

import datetime
import json
import os
import posixpath
import re
import socket
import uuid
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tfdist_ext.errors import TrainingError
from tfdist_ext.training.checkpoints.format import (
    CheckpointFile,
    DamagedCheckpointError,
    Progress,
)
from tfdist_ext.training.checkpoints.paths import (
    error_if_unwritable,
    names_in,
    open_file,
    os_errors,
    remove,
    rename,
    write_atomically,
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
        job: the host, the process and the start of one `fit`.
        epochs_when_done: the `epochs` of the `fit`, once that has completed.
    """

    job: str
    epochs_when_done: int | None = None

    @classmethod
    def this_job(cls) -> Owner:
        start = datetime.datetime.now().astimezone()
        return cls(f"host {socket.gethostname()}, process {os.getpid()}, since {start}")


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
    """

    def __init__(self, path: str):
        self.path = path
        self.newest: str | None = None
        self.progress = Progress()
        self._owner = Owner.this_job()
        self._id = uuid.uuid4().hex  # several jobs may write unfinished files

    def file(self, name: str) -> str:
        """Returns the path of a file in the folder."""
        return posixpath.join(self.path, name)

    def open(self) -> None:
        """Becomes the owner of the folder, and finds the newest complete checkpoint.

        Newer checkpoints that are damaged are renamed.

        Raises:
            TrainingError: the folder cannot be written, or it has checkpoints and none is
                complete.
        """
        self._write_owner()
        for name in filter(_UNFINISHED.fullmatch, names_in(self.path)):
            remove(self.file(name))
        damaged: dict[str, DamagedCheckpointError] = {}
        for name in reversed(checkpoints_in(self.path)):
            try:
                with CheckpointFile(self.file(name)) as file:
                    self.newest, self.progress = name, file.progress
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
            rename(self.file(name), self.file(aside))

    def write(self, progress: Progress, blocks: Iterable[bytes | memoryview]) -> None:
        """Writes a checkpoint, and removes old ones.

        Args:
            blocks: the bytes of the checkpoint.

        Raises:
            FolderTakenError: another job has opened the folder.
            TrainingError: the file cannot be written, for example because the disk is full.
        """
        name = name_of(progress)
        self._check_owner()
        try:
            write_atomically(self.file(name), self._unfinished(name), blocks, self._check_owner)
            self.newest, self.progress = name, progress
            for old in checkpoints_in(self.path)[:-KEPT]:
                self._check_owner()
                remove(self.file(old))
        except OSError as error:
            self._check_owner()  # a newer job removes what this one has not finished
            raise TrainingError(
                f"{name} could not be written to {self.path}: {error.strerror or error}. The last"
                f" complete checkpoint is {self.newest}. Free disk space or correct the permissions"
                " of checkpoint_dir, and run the job again."
            ) from error

    def finish(self, epochs: int) -> None:
        """Notes that the training has completed.

        Args:
            epochs: of the whole training.
        """
        self._check_owner()
        self._owner = replace(self._owner, epochs_when_done=epochs)
        self._write_owner()

    def _check_owner(self) -> None:
        """Passes if this job may write.

        Raises:
            FolderTakenError: another job has opened the folder.
        """
        newest = owner_of(self.path)
        if newest is None:  # the folder was emptied
            self._write_owner()
        elif newest.job != self._owner.job:
            raise FolderTakenError(
                f"Another job writes to {self.path}: {newest.job}. This job stops and changes"
                " nothing there. Give each training its own checkpoint_dir."
            )

    def _write_owner(self) -> None:
        text = json.dumps(asdict(self._owner), indent=1)
        with error_if_unwritable(self.path, "checkpoint_dir"):
            write_atomically(self.file(OWNER), self._unfinished(OWNER), [text.encode()])

    def _unfinished(self, name: str) -> str:
        return self.file(f".{name}.{self._id}.unfinished")
