"""The folder of `fit(checkpoint_dir=...)`: its checkpoints, and the job that owns it.

The list of checkpoints is the list of file names: `epoch-00003.safetensors`, and in the middle of
an epoch `epoch-00003-batch-00000120.safetensors`. A file appears when it is complete.

`owner.json` names the job that has begun to train here last. A job reads `owner.json` before it
gives a new file its name, and stops with an error if the file names another job. The file also says
whether the training is done.
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
from concurrent import futures
from pathlib import Path
from typing import Any

import numpy as np

from tfdist_ext.errors import TrainingError
from tfdist_ext.training.checkpoints.format import (
    Arrays,
    DamagedCheckpointError,
    Progress,
    encode_checkpoint,
    names_in,
    open_checkpoint,
    open_file,
    remove,
    write_atomically,
)
from tfdist_ext.training.state import is_table, whole_value
from tfdist_ext.user_frames import filter_traceback, warn

KEPT = 3

OWNER = "owner.json"

# A callback may write other files into the folder, such as `epoch-01.weights.h5`.
_CHECKPOINT = re.compile(r"epoch-(\d{5,})(?:-batch-(\d{8,}))?\.safetensors")

_UNFINISHED = re.compile(r"\.(epoch-\d.*|owner\.json)\.[0-9a-f]{32}\.unfinished")


class FolderTakenError(TrainingError):
    """Another job has begun to train in the folder later, so this job stops."""


def name_of(progress: Progress) -> str:
    """Returns the name of a checkpoint."""
    middle = f"-batch-{progress.batches:08d}" if progress.batches else ""
    return f"epoch-{progress.epoch:05d}{middle}.safetensors"


def checkpoints_in(folder: str) -> list[str]:
    """Returns the paths of the checkpoints in a folder, the oldest first."""
    matches = [match for match in map(_CHECKPOINT.fullmatch, names_in(folder)) if match]
    matches.sort(key=lambda match: (int(match[1]), int(match[2] or 0)))
    return [posixpath.join(folder, match[0]) for match in matches]


@filter_traceback
def finished_checkpoints(directory: str | os.PathLike[str]) -> list[Path]:
    """Returns the checkpoints of `fit(checkpoint_dir=directory)`, the oldest first.

    `fit` keeps the last three checkpoints. The paths in a remote store are strings.
    """
    paths: list[Any] = checkpoints_in(folder := os.fspath(directory))
    return paths if "://" in folder else [Path(path) for path in paths]


@filter_traceback
def training_is_done(directory: str | os.PathLike[str]) -> bool:
    """Returns whether the training that saves to `directory` is complete."""
    return epochs_when_done(os.fspath(directory)) is not None


def epochs_when_done(folder: str) -> int | None:
    """Returns the `epochs` of the `fit` that has completed in a folder; None if none has."""
    return _owner_of(folder).get("epochs_when_done")


def _owner_of(folder: str) -> dict[str, Any]:
    """Returns the content of `owner.json`, or an empty dict if it is missing or damaged."""
    try:
        with open_file(posixpath.join(folder, OWNER)) as file:
            return dict(json.loads(file.read()))
    except (FileNotFoundError, ValueError, TypeError):
        return {}


class CheckpointFolder:
    """A checkpoint folder, on the chief.

    Args:
        report: called for each block that is read or written while the training waits.
        in_background: write in a thread, from copies of the state. The training waits only while
            the state is copied, and while the checkpoint before is written. Tables are not copied.

    Attributes:
        newest: the path of the last checkpoint that this job has found or written, or None.
        progress: of that checkpoint.
    """

    def __init__(
        self,
        path: str | Path,
        report: Callable[[], object] = lambda: None,
        *,
        in_background: bool = False,
    ):
        self.path = os.fspath(path)
        if not self.path:
            raise TrainingError('checkpoint_dir is empty. Pass "." for the working folder.')
        self.newest: str | None = None
        self.progress = Progress()
        self._damaged: set[str] = set()  # paths of files that do not count as kept
        start = datetime.datetime.now().astimezone()
        self._job = f"host {socket.gethostname()}, process {os.getpid()}, since {start}"
        self._writer = f".{uuid.uuid4().hex}"  # several jobs may write unfinished files
        self._report = report
        self._training_waits = False
        self._running: futures.Future[None] | None = None
        self._thread: futures.ThreadPoolExecutor | None = None
        if in_background:
            self._thread = futures.ThreadPoolExecutor(1, "tfdist-checkpoints")

    def find_newest(self) -> None:
        """Finds the newest complete checkpoint, and changes nothing.

        Raises:
            TrainingError: the folder has checkpoints, and none is complete.
        """
        damaged = ""
        for path in reversed(checkpoints_in(self.path)):
            try:
                with open_checkpoint(path, self._report) as file:
                    self.newest, self.progress = path, file.progress
                break
            except DamagedCheckpointError as error:
                damaged += f"{error} "
                self._damaged.add(path)
        if damaged and self.newest is None:
            raise TrainingError(
                f"{self.path} has no complete checkpoint: {damaged}Move these files away to start"
                " the training again, or use another folder."
            )
        if damaged:
            warn(f"{damaged}The training resumes from {self.newest}.")

    def take(self) -> None:
        """Becomes the owner of the folder, and removes what an earlier job has not finished.

        Raises:
            TrainingError: the folder cannot be written.
        """
        self._write_owner()
        for name in filter(_UNFINISHED.fullmatch, names_in(self.path)):
            remove(posixpath.join(self.path, name))

    def begin(self, progress: Progress, arrays: Arrays) -> None:
        """Writes a checkpoint; in the background, returns when the state is copied.

        Args:
            arrays: NumPy arrays must not change later.

        Raises:
            Exception: the error of the checkpoint before.
        """
        self.wait()
        variables = [array for array in arrays.values() if not isinstance(array, np.ndarray)]
        if self._thread is None or any(map(is_table, variables)):
            self.write(progress, encode_checkpoint(progress, arrays, self._report))
            return
        copies = {
            name: array if isinstance(array, np.ndarray) else whole_value(array)
            for name, array in arrays.items()
        }
        blocks = encode_checkpoint(
            progress, copies, lambda: self._training_waits and self._report()
        )
        self._running = self._thread.submit(self.write, progress, blocks)

    def wait(self) -> None:
        """Returns when everything is written.

        Raises:
            Exception: the error of `write`.
        """
        if (running := self._running) is not None:
            self._training_waits = True
            futures.wait([running])
            self._training_waits, self._running = False, None
            running.result()

    def close(self) -> None:
        """Ends the thread."""
        if self._thread is not None:
            self._thread.shutdown()

    def write(self, progress: Progress, blocks: Iterable[bytes | memoryview]) -> None:
        """Writes a checkpoint, and removes old ones if possible.

        Args:
            blocks: the bytes of the checkpoint.

        Raises:
            FolderTakenError: another job has begun to train in the folder.
            TrainingError: the file cannot be written, for example because the disk is full.
        """
        path = posixpath.join(self.path, name_of(progress))
        write_atomically(path, blocks, writer=self._writer, before_rename=self._check_owner)
        self.newest, self.progress = path, progress
        self._damaged.discard(path)
        complete = [path for path in checkpoints_in(self.path) if path not in self._damaged]
        for old in complete[:-KEPT]:
            try:
                remove(old)
            except OSError as error:
                warn(f"The old checkpoint {old} cannot be removed: {error.strerror or error}.")

    def finish(self, epochs: int) -> None:
        """Waits for the last file, and notes that all epochs are complete."""
        self.wait()
        self._check_owner()
        self._write_owner(epochs)

    def _check_owner(self) -> None:
        """Raises FolderTakenError if another job has begun to train in the folder."""
        job = _owner_of(self.path).get("job")
        if job is None:  # the folder was emptied
            self._write_owner()
        elif job != self._job:
            raise FolderTakenError(
                f"Another job writes to {self.path}: {job}. This job stops and changes nothing"
                " there. Give each training its own checkpoint_dir."
            )

    def _write_owner(self, epochs_when_done: int | None = None) -> None:
        owner = {"job": self._job, "epochs_when_done": epochs_when_done}
        text = json.dumps(owner, indent=1).encode()
        write_atomically(posixpath.join(self.path, OWNER), [text], writer=self._writer)
