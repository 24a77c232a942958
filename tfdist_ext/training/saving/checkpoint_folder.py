"""The folder of fit(checkpoint_dir=...) as the one who writes there sees it.

Two jobs in one folder must not cost a checkpoint, whenever each of them is stopped and woken. The
older one looks for a newer owner before it changes anything (`folder_owner`), and where it is
stopped after that look:

- A new checkpoint takes no name that is in use, and two jobs never write into one file.
- An index says of which job it is. One that an older job has put over that of a newer does not
  agree with the files, and is made again from them.
- A job removes only files that it knows to be replaced: those of its own index.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path

from tfdist_ext.errors import TrainingError
from tfdist_ext.training.saving.checkpoint_index import INDEX, KEPT, Index, Progress
from tfdist_ext.training.saving.complete_files import (
    moved_if_free,
    naming_unwritable,
    on_disk,
    to_disk,
)
from tfdist_ext.training.saving.folder_owner import Owner, claim, newest_owner

__all__ = ["CheckpointFolder"]

# What a job that was killed leaves behind, with its generation.
_UNFINISHED = re.compile(
    r"\.((epoch|last)-\d[\w-]*\.h5(\.(?P<job>\d{5,}))?"
    r"|(checkpoints|owner-\d+|probe)\.json(\.[0-9a-f]{32})?)\.unfinished"
)


class CheckpointFolder:
    """A checkpoint folder, on the chief.

    Attributes:
        path: of the folder.
        index: what is in it, as this job knows.
        written: the name of the file that was written last.
    """

    def __init__(self, path: Path):
        self.path = path
        self.index = Index()
        self._owner: Owner | None = None
        self._listed: set[str] = set()  # by the index that this job has read, or written last
        self.written = ""

    def open(self, epochs: int) -> None:
        """Become the folder's owner, unless the training in it is complete; read the index.

        Args:
            epochs: of the whole training.

        Raises:
            TrainingError: nothing can be written there, or no checkpoint that is there be read.
        """
        if self._is_complete(epochs):
            return  # nothing will be written: it may be an archive
        with naming_unwritable(self.path, "checkpoint_dir"):
            self.path.mkdir(parents=True, exist_ok=True)
            self._owner, before = claim(self.path, after=self.index.generation)
            if before is not None and before.may_be_running():
                self._warn_of(before)
            self._remove_unfinished()
            self.index, faults = Index.checked(self.path)
            self._listed = _names(self.index)
            training = self.index.training or uuid.uuid4().hex
            if training != self._owner.training:
                self._owner = self._owner.update(self.path, training=training)
        if faults:
            goes_on = "goes on from what is there; to start it anew, give another folder"
            if not self._listed:
                goes_on = "starts anew: there are no checkpoints"
            warnings.warn(
                f"{self.path}: {'; '.join(faults)}. The training {goes_on}.", stacklevel=3
            )
            self._check_goes_on(epochs)
        if faults or self._listed:
            self.write_index()

    def last_state(self, epochs: int) -> str | None:
        """The file with the state at the end of a training of that many epochs, if it has ended."""
        done = self.index.epochs_when_done
        name = self.index.last_state
        if done is None or done < epochs or name is None or not (self.path / name).exists():
            return None
        return name

    @property
    def attributes(self) -> dict[str, int | str]:
        """What a checkpoint of this job says of itself, so that an index can be made from it."""
        if self._owner is None:  # not the chief
            return {}
        return {"training": self._owner.training, "generation": self._owner.generation}

    @contextlib.contextmanager
    def new_file(self, path: Path) -> Iterator[Path]:
        """A path to write to, for a new checkpoint of this folder that is to be called `path`.

        Where a file of that name is there, the new one gets another.

        Raises:
            FolderTakenError: a newer job has the folder.
            TrainingError: the file cannot be written, as on a full disk.
        """
        assert self._owner is not None
        generation = f"{self._owner.generation:05d}"
        beside = path.with_name(f".{path.name}.{generation}.unfinished")
        with self._writing(path.name), on_disk(beside) as unfinished:
            yield unfinished
            to_disk(unfinished)
            self._owner.check(self.path)
            if not moved_if_free(unfinished, path):
                # No other job writes files of this name.
                path = path.with_stem(f"{path.stem}-gen-{generation}")
                os.replace(unfinished, path)
        self.written = path.name

    def add(self, progress: Progress) -> None:
        """Take the checkpoint that was just written into the index, in place of older ones."""
        place = (progress.epoch, progress.batches)
        others = self.index.checkpoints.items()
        kept = {name: at for name, at in others if (at.epoch, at.batches) != place}
        kept[self.written] = progress
        self.index.checkpoints = dict(list(kept.items())[-KEPT:])
        self.write_index()

    def add_last(self, epochs: int, *, written: bool) -> None:
        """Say in the index that the training has come to its end.

        Args:
            epochs: that it was to have.
            written: the state at the end was just written; else it is lost.
        """
        self.index.last_state = self.written if written else None
        self.index.epochs_when_done = epochs
        self.write_index()

    def write_index(self) -> None:
        """Write the index, and remove checkpoints that it does not name any more.

        Raises:
            FolderTakenError: a newer job has the folder.
            TrainingError: it cannot be written, as on a full disk.
        """
        assert self._owner is not None
        self.index.training = self._owner.training
        self.index.generation = self._owner.generation
        with self._writing(INDEX):
            self.index.write(self.path)
        replaced, self._listed = self._listed, _names(self.index)
        for name in replaced - self._listed:
            self._owner.check(self.path)
            (self.path / name).unlink(missing_ok=True)

    def close(self) -> None:
        """Say that this job will not write any more; the next one need not ask about it."""
        if self._owner is not None:
            with contextlib.suppress(OSError, TrainingError):  # it is a courtesy
                self._owner.update(self.path, ended=True)

    def _is_complete(self, epochs: int) -> bool:
        try:
            self.index, fault = Index.stored(self.path)
            newest = newest_owner(self.path)
        except OSError:
            return False
        by_the_newest = self.index.generation >= (newest.generation if newest else 0)
        return fault is None and by_the_newest and self.last_state(epochs) is not None

    def _remove_unfinished(self) -> None:
        assert self._owner is not None
        for path in list(self.path.iterdir()):
            match = _UNFINISHED.fullmatch(path.name)
            if match and int(match["job"] or 0) < self._owner.generation:
                self._owner.check(self.path)
                path.unlink(missing_ok=True)

    def _check_goes_on(self, epochs: int) -> None:
        last = self.index.last_state
        if last is not None and not self.index.checkpoints and self.last_state(epochs) is None:
            raise TrainingError(
                f"{self.path} must have a checkpoint of the last epoch to train {epochs} epochs,"
                f" got {last} alone, the state at the end of {self.index.epochs_when_done} epochs:"
                " averaged or restored weights, perhaps. To train on from it nevertheless, call"
                f" restore_checkpoint({str(self.path / last)!r}), and fit() with initial_epoch and"
                " another checkpoint_dir."
            )

    @contextlib.contextmanager
    def _writing(self, name: str) -> Iterator[None]:
        assert self._owner is not None
        try:
            self._owner.check(self.path)
            yield
        except OSError as error:
            with contextlib.suppress(OSError):
                self._owner.check(self.path)  # a newer job removes what this one has not finished
            last = next(reversed(self.index.checkpoints), None)
            stays = f"the last complete checkpoint, {last}, stays" if last else "there is no other"
            raise TrainingError(
                f"checkpoint_dir must be writable, and {name} could not be written to {self.path}:"
                f" {type(error).__name__}: {error.strerror or error}. Nothing of it is left there;"
                f" {stays}. Free disk space or correct the folder's permissions, and run the job"
                " again."
            ) from error

    def _warn_of(self, before: Owner) -> None:
        wrote = before.since
        with contextlib.suppress(OSError):
            wrote = max(wrote, (self.path / INDEX).stat().st_mtime)
        warnings.warn(
            f"checkpoint_dir must have one writer, and another job has {self.path}: {before}; it"
            f" wrote last {max(0, time.time() - wrote):.0f} s ago and has not said that it ended."
            " This job takes the folder over: the other one, if it still runs, stops before it"
            " writes there again. Give each training a checkpoint_dir of its own.",
            stacklevel=3,
        )


def _names(index: Index) -> set[str]:
    return {*index.checkpoints, *filter(None, [index.last_state])}
