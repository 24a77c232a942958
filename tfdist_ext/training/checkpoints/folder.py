"""The folder of fit(checkpoint_dir=...): its files, its index, and the job that owns it.

Two jobs in one folder must not cost a checkpoint, whenever each of them is stopped and woken.
Each job that trains into a folder takes the next generation: it creates `owner-00007.json`
exclusively, which is atomic on network file systems too, where locks often are not. The older one
looks for a newer owner before each write, rename and delete. Where it is stopped after that look,
nothing that it may still do destroys a newer job's files:

- A new checkpoint takes no name that is in use, and two jobs never write into one file.
- An index says of which job it is. One that an older job has put over that of a newer does not
  agree with the files, and is rebuilt from them.
- A job removes only files that it knows to be replaced: those of its own index.

The index is a small JSON file, replaced at once: a reader on another machine sees the old or the
new one. Each checkpoint also says for itself what it is. So an index that is lost, damaged or not
that of the files is detected, and rebuilt from them.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import time
import uuid
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from tfdist_ext.errors import TrainingError
from tfdist_ext.training.checkpoints.atomic_write import (
    AnyPath,
    RemotePath,
    atomic_write,
    create_exclusively,
    files_in,
    moved_if_free,
    naming_unwritable,
    on_disk,
    path_of,
    to_disk,
)
from tfdist_ext.training.checkpoints.file import CheckpointFile, DamagedCheckpointError
from tfdist_ext.user_frames import filter_traceback, warn

__all__ = [
    "CheckpointFolder",
    "FolderTakenError",
    "Index",
    "Owner",
    "Progress",
    "claim",
    "finished_checkpoints",
    "newest_owner",
    "training_is_done",
]


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

    def __init__(self, path: AnyPath):
        self.path = path
        self.index = Index()
        self._owner = Owner(0)  # this job, where it has opened the folder
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
            if before.may_be_running():
                self._warn_of(before)
            self._remove_unfinished()
            self.index, faults, damaged = Index.checked(self.path, epochs)
            self._listed = set(self.index.files)
            training = self.index.training or uuid.uuid4().hex
            if training != self._owner.training:
                self._owner = self._owner.update(self.path, training=training)
        if faults:
            goes_on = "resumes from what is there; to start it anew, give another folder"
            if not self._listed:
                goes_on = "starts anew: there are no checkpoints"
            warn(f"{self.path}: {'; '.join(faults)}. The training {goes_on}.")
            self._check_goes_on(epochs)
            for name in damaged:
                self._owner.check(self.path)
                (self.path / name).replace(self.path / _aside(name))
        if faults or self._listed:
            self.write_index()

    def last_state(self, epochs: int) -> str | None:
        """The file with the state at the end of a training of that many epochs, if it has ended."""
        name = self.index.last_state_of(epochs)
        return name if name is not None and (self.path / name).exists() else None

    @property
    def attributes(self) -> dict[str, int | str]:
        """The attributes of a checkpoint of this job, from which an index can be rebuilt."""
        if not self._owner.generation:  # not the chief
            return {}
        return {"training": self._owner.training, "generation": self._owner.generation}

    @contextlib.contextmanager
    def new_file(self, path: AnyPath) -> Iterator[AnyPath]:
        """A path to write to, for a new checkpoint of this folder that is to be called `path`.

        Where a file of that name is there, the new one gets another.

        Raises:
            FolderTakenError: a newer job has the folder.
            TrainingError: the file cannot be written, as on a full disk.
        """
        generation = f"{self._owner.generation:05d}"
        beside = path.with_name(f".{path.name}.{generation}.unfinished")
        with self._writing(path.name), on_disk(beside) as unfinished:
            yield unfinished
            to_disk(unfinished)
            self._owner.check(self.path)
            if not moved_if_free(unfinished, path):
                # No other job writes files of this name.
                path = path.with_stem(f"{path.stem}-gen-{generation}")
                unfinished.replace(path)
        self.written = path.name

    def link(self, name: str) -> bool:
        """Give the file that was written last a second name; whether that could be done.

        It cannot where the name is in use, or the file system has no hard links.
        """
        if isinstance(self.path, RemotePath):
            return False
        with self._writing(name):
            try:
                os.link(self.path / self.written, self.path / name)
            except OSError:
                return False
        self.written = name
        return True

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
        self.index.training = self._owner.training
        self.index.generation = self._owner.generation
        with self._writing(INDEX):
            self.index.write(self.path)
        replaced, self._listed = self._listed, set(self.index.files)
        for name in replaced - self._listed:
            self._owner.check(self.path)
            (self.path / name).unlink(missing_ok=True)

    def close(self) -> None:
        """Say that this job will not write any more; the next one need not ask about it."""
        if self._owner.generation:
            with contextlib.suppress(OSError, TrainingError):  # it is a courtesy
                self._owner.update(self.path, ended=True)

    def _is_complete(self, epochs: int) -> bool:
        try:
            self.index, fault = Index.stored(self.path)
            newest = newest_owner(self.path)
        except OSError:
            return False
        by_the_newest = self.index.generation >= newest.generation
        complete = fault is None and by_the_newest and self.last_state(epochs) is not None
        return complete and not _damage(self.index, self.path, epochs)

    def _remove_unfinished(self) -> None:
        for path in files_in(self.path):
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
        warn(
            f"checkpoint_dir must have one writer, and another job has {self.path}: {before}; it"
            f" wrote last {max(0, time.time() - wrote):.0f} s ago and has not said that it ended."
            " This job takes the folder over: the other one, if it still runs, stops before it"
            " writes there again. Give each training a checkpoint_dir of its own."
        )


KEPT = 3


def _aside(name: str) -> str:
    """The new name of a damaged file. To ram:// `NAME.h5.damaged` makes a folder of `NAME.h5`."""
    return f"{name.removesuffix('.h5')}.damaged"


_MISSING = "is missing"


INDEX = "checkpoints.json"


_FORMAT = "tfdist_ext checkpoints 2"


_WITHOUT_CHECKSUM = "tfdist_ext checkpoints 1"  # before there were owners


LAST = "last-"  # the state at the end of a fit


# Other files may be here too, such as `epoch-01.weights.h5` of a callback.
_CHECKPOINT = re.compile(r"(epoch|last)-\d{5,}(-batch-\d{8,})?(-gen-\d{5,})?\.h5")


@dataclass(frozen=True)
class Progress:
    """The progress of a training.

    Attributes:
        epoch: epochs that are done, and so the number of the next one, counted from 0.
        step: global batches that are done, as the optimizer counts them.
        first_epoch: the epoch in which the data was at its beginning.
        seed: where the order of examples starts; 0 where none are shuffled.
        batches: global batches of the next epoch that are done already.
        batch_size: examples in each of them, where the data is arrays; else 0.
        data: the state of a ShardedDataset, as JSON; empty with other data.
        trained: the logs of the last epoch's training, as JSON, where its validation is to be done;
            else empty.
    """

    epoch: int = 0
    step: int = 0
    first_epoch: int = 0
    seed: int = 0
    batches: int = 0
    batch_size: int = 0
    data: str = ""
    trained: str = ""

    @classmethod
    def of(cls, file: CheckpointFile) -> Progress:
        """The progress of the training that wrote a checkpoint."""
        numbers = {name: file.number(name) for name in cls().numbers}
        return cls(**numbers, data=file.text("data"), trained=file.text("trained"))

    @property
    def numbers(self) -> dict[str, int]:
        """The fields that are numbers, by name."""
        return {name: value for name, value in asdict(self).items() if isinstance(value, int)}


@dataclass
class Index:
    """The index of a folder of checkpoints.

    Attributes:
        checkpoints: file name -> progress, the oldest first.
        epochs_when_done: the `epochs` of the last fit that came to its end; None while one runs
            or after one that was interrupted.
        last_state: the file with the state at that end, None where its loss was not finite.
        training: whose checkpoints these are; empty where an older version wrote them.
        generation: of the job that wrote this index (see `folder_owner`).
    """

    checkpoints: dict[str, Progress] = field(default_factory=dict)
    epochs_when_done: int | None = None
    last_state: str | None = None
    training: str = ""
    generation: int = 0

    @classmethod
    def read(cls, folder: AnyPath) -> Index:
        """The index of a folder, for a reader; an empty one if there is no index.

        Where the index is lost, damaged, or not of the newest job, it is what the files say.

        Raises:
            TrainingError: no checkpoint can be read, or they are of several trainings.
        """
        index, fault = cls.stored(folder)
        owner = newest_owner(folder)
        if fault is None and index.generation >= owner.generation:
            return index
        found, damaged = _look_into_files(folder, verify=False)
        return _made_from(found, damaged, folder, [owner.training, index.training])[0]

    @classmethod
    def checked(cls, folder: AnyPath, epochs: int) -> tuple[Index, list[str], list[str]]:
        """(the index of a folder, what was wrong with it or its files, the damaged files).

        The index is rebuilt from the files whose checksums are right if the two do not agree, or
        if the file from which a training of `epochs` epochs resumes is damaged.

        Raises:
            TrainingError: no checkpoint can be read, or they are of several trainings.
        """
        index, fault = cls.stored(folder)
        training = newest_owner(folder).training
        found, damaged = _look_into_files(folder, verify=False)
        fault = fault or _disagreement(index, found, training)
        if fault is None:
            removed = index._forget_removed(folder)
            fault = _damage(index, folder, epochs)
            if not fault:
                return index, removed, []
        if not found and not damaged:
            return cls(), [] if fault == _MISSING else [f"{INDEX} {fault}"], []
        found, damaged = _look_into_files(folder, verify=True)
        index, others = _made_from(found, damaged, folder, [training, index.training])
        files = ", ".join(index.files)
        aside = [n for n, error in damaged.items() if isinstance(error, DamagedCheckpointError)]
        return index, [f"{INDEX} {fault}", f"rebuilt from {files}", *others], aside

    @classmethod
    def stored(cls, folder: AnyPath) -> tuple[Index, str | None]:
        """(what the file says, None), or (an empty index, what is wrong with the file)."""
        try:
            return cls._of_text((folder / INDEX).read_text(encoding="utf-8")), None
        except FileNotFoundError:
            return cls(), _MISSING
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            return cls(), f"is damaged ({error or type(error).__name__})"

    def write(self, folder: AnyPath) -> None:
        """Put it in the folder."""
        content = {"format": _FORMAT, **asdict(self)}
        text = json.dumps({**content, "crc32": _checksum(content)}, indent=1)
        with atomic_write(folder / INDEX) as unfinished:
            unfinished.write_text(text, encoding="utf-8")

    @property
    def files(self) -> list[str]:
        """The names of all files that it lists."""
        return [*self.checkpoints, *filter(None, [self.last_state])]

    def last_state_of(self, epochs: int) -> str | None:
        """The file with the state at the end of a training of that many epochs."""
        done = self.epochs_when_done
        return self.last_state if done is not None and done >= epochs else None

    @classmethod
    def _of_text(cls, text: str) -> Index:
        read = json.loads(text)
        if read["format"] not in (_FORMAT, _WITHOUT_CHECKSUM):
            raise ValueError(f"format {read['format']!r}")
        if read["format"] == _FORMAT and read.pop("crc32") != _checksum(read):
            raise ValueError("its checksum is wrong")
        del read["format"]
        read["checkpoints"] = {k: Progress(**v) for k, v in read["checkpoints"].items()}
        return cls(**read)

    def _forget_removed(self, folder: AnyPath) -> list[str]:
        """Leave out files that somebody has removed, as one does with damaged ones.

        All stay where no checkpoint is left: that is a folder to look at, and no training to
        start anew.

        Returns:
            What to say about it.
        """
        removed = [name for name in self.checkpoints if not (folder / name).exists()]
        if len(removed) == len(self.checkpoints):
            return []
        for name in removed:
            del self.checkpoints[name]
        if self.last_state is not None and not (folder / self.last_state).exists():
            removed.append(self.last_state)
            self.last_state = None
        return [f"lacks {', '.join(removed)} of its index"] if removed else []


@filter_traceback
def finished_checkpoints(directory: str | os.PathLike[str]) -> list[AnyPath]:
    """The complete checkpoints of `fit(checkpoint_dir=directory)`, the oldest first.

    Old ones are removed while the training runs: the last few stay.
    """
    folder = path_of(directory)
    return [folder / name for name in Index.read(folder).checkpoints]


@filter_traceback
def training_is_done(directory: str | os.PathLike[str]) -> bool:
    """Whether the fit that saves to `directory` has come to its end."""
    return Index.read(path_of(directory)).epochs_when_done is not None


@dataclass(frozen=True)
class _Found:
    """The attributes that a checkpoint holds of itself.

    Attributes:
        progress: of the training, when it was saved.
        training: the id of the training.
        generation: of the job that saved it.
        epochs_when_done: the `epochs` of the fit that ended with this state; 0 of other states.
    """

    progress: Progress
    training: str
    generation: int
    epochs_when_done: int

    @property
    def of_epoch(self) -> bool:
        """Whether a training resumes from it."""
        return not self.epochs_when_done

    @property
    def order(self) -> tuple[int, int, int]:
        """The sort key: by job, then by progress, as an older job may have been ahead."""
        return self.generation, self.progress.epoch, self.progress.batches


def _checksum(content: dict[str, object]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def _look_into_files(
    folder: AnyPath, *, verify: bool
) -> tuple[dict[str, _Found], dict[str, TrainingError]]:
    """(name -> checkpoint, name -> why it cannot be read).

    Args:
        verify: compare the checksums of all values; else only the attributes are read.
    """
    found, damaged = {}, {}
    for path in files_in(folder):
        if not _CHECKPOINT.fullmatch(path.name):
            continue
        try:
            with CheckpointFile(path) as file:
                progress, when_done = Progress.of(file), file.number("epochs_when_done")
                if path.name.startswith(LAST) and not when_done:  # a link to that of the epoch
                    when_done = progress.epoch
                training, generation = file.text("training"), file.number("generation")
                found[path.name] = _Found(progress, training, generation, when_done)
                if verify:
                    file.verify()
        except TrainingError as error:
            found.pop(path.name, None)
            if path.exists():  # it was not removed meanwhile, by the job that writes here
                damaged[path.name] = error
    return found, damaged


def _damage(index: Index, folder: AnyPath, epochs: int) -> str:
    """What is wrong with the file from which a training of `epochs` epochs resumes; "": nothing."""
    name = index.last_state_of(epochs) or next(reversed(index.checkpoints), None)
    if name is not None and (folder / name).exists():
        try:
            with CheckpointFile(folder / name) as file:
                file.verify()
        except DamagedCheckpointError:
            return f"names {name}, which is damaged"
    return ""


def _disagreement(index: Index, found: dict[str, _Found], training: str) -> str | None:
    """Why an index cannot be the one of these files; None where it may be."""
    if training and index.training and training != index.training:
        return "is of another training"
    for name, listed in index.checkpoints.items():
        if (file := found.get(name)) is None:
            continue
        of_another = index.training and file.training not in ("", index.training)
        if of_another or file.progress.numbers != listed.numbers:
            return f"does not describe {name}"
    known = set(index.files)
    if index.checkpoints and not known & found.keys() and any(f.of_epoch for f in found.values()):
        return "names no file that can be read"
    newest = max((file.order for name, file in found.items() if name in known), default=(-1, 0, 0))
    for name, file in found.items():
        if name in known or file.training != index.training:
            continue
        # The state at the end of a fit is written when the epoch before it is in the index.
        if file.order > newest or (file.order == newest and not file.of_epoch):
            return f"is older than {name}"
    return None


def _made_from(
    found: dict[str, _Found], damaged: dict[str, TrainingError], folder: AnyPath, known: list[str]
) -> tuple[Index, list[str]]:
    """(an index of these files, what to say of those that are left alone).

    Args:
        known: whose files they are, by the folder's owner and by the index that was there, which
            may tell as well; empty where they do not know.
    """
    ours = [file for file in found.values() if not any(known) or file.training in ("", *known)]
    if not ours and damaged:
        raise TrainingError(
            f"{folder} has no checkpoint of this training that can be read:"
            f" {'; '.join(str(error) for error in damaged.values())} Move these files away to start"
            " the training anew, or give another folder."
        )
    trainings: dict[str, list[str]] = {}
    for name, file in found.items():
        trainings.setdefault(file.training, []).append(name)
    known = [one for one in known if one and one in trainings]
    if not known and len(trainings) > 1:
        groups = " and ".join(f"({', '.join(names)})" for names in trainings.values())
        raise TrainingError(
            f"{folder} must hold the checkpoints of one training, got those of {len(trainings)}:"
            f" {groups}, and no usable {INDEX} that says which one resumes. Move all but one away."
        )
    chosen = known[0] if known else next(iter(trainings), "")
    newest_first = sorted(trainings.get(chosen, []), key=lambda n: found[n].order, reverse=True)
    last = next((name for name in newest_first if not found[name].of_epoch), None)
    names: list[str] = []
    for name in newest_first:
        ahead = names and found[name].order[1:] >= found[names[-1]].order[1:]
        if found[name].of_epoch and not ahead:
            names.append(name)
    names = names[:KEPT]
    at_end = last is not None and (not names or found[last].order >= found[names[0]].order)
    index = Index(
        {name: found[name].progress for name in reversed(names)},
        found[last].epochs_when_done if at_end and last is not None else None,
        last,
        chosen,
        max((file.generation for file in found.values()), default=0),
    )
    left = [
        f"{name} is damaged and set aside as {_aside(name)}"
        if isinstance(error, DamagedCheckpointError)
        else f"{name} cannot be read and stays as it is"
        for name, error in damaged.items()
    ]
    left += [
        f"{', '.join(others)} of another training left alone"
        for one, others in trainings.items()
        if one != chosen
    ]
    return index, left


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

    def check(self, folder: AnyPath) -> None:
        """Pass if this job may still write.

        Raises:
            FolderTakenError: a newer job has opened the folder.
        """
        newest = newest_owner(folder)
        if not newest.generation:  # somebody has emptied the folder
            folder.mkdir(parents=True, exist_ok=True)
            if _create(folder, self):
                return
            newest = newest_owner(folder)
        if newest.generation < self.generation or newest.id == self.id:
            return
        if newest.id or newest.generation > self.generation:
            raise FolderTakenError(
                f"checkpoint_dir must have one writer, got a newer job in {folder}: {newest}. This"
                " job stops before it writes there again, and the checkpoints of the newer one"
                " stay. Give each training a checkpoint_dir of its own."
            )

    def update(self, folder: AnyPath, *, training: str | None = None, ended: bool = False) -> Owner:
        """Write this owner's record anew.

        Raises:
            FolderTakenError: a newer job has opened the folder.
        """
        self.check(folder)
        updated = replace(self, training=training or self.training, ended=ended)
        # No other job ever writes a file of this generation.
        with atomic_write(folder / _file_of(self.generation)) as unfinished:
            unfinished.write_text(json.dumps(asdict(updated)), encoding="utf-8")
        return updated


def claim(folder: AnyPath, *, after: int = 0) -> tuple[Owner, Owner]:
    """(this job as the newest owner of the folder, the owner before it).

    Args:
        after: a generation that is known to have been, where its record may be lost.

    Raises:
        OSError: no file can be created in the folder.
    """
    while True:
        before = newest_owner(folder)
        generation = max(after, before.generation) + 1
        boot, container = _machine()
        owner = Owner(
            generation,
            id=uuid.uuid4().hex,
            host=socket.gethostname(),
            machine=f"{boot} {container}",
            pid=os.getpid(),
            started=_started(os.getpid()),
            since=time.time(),
            training=before.training,
        )
        # One that is removed as old, by a job that came meanwhile, can be created twice.
        if _create(folder, owner) and newest_owner(folder) == owner:
            break
    for older in _generations(folder):
        if older < generation:
            (folder / _file_of(older)).unlink(missing_ok=True)
    return owner, before


def newest_owner(folder: AnyPath) -> Owner:
    """The owner of the highest generation, which is 0 where no job has opened the folder."""
    newest = max(_generations(folder), default=0)
    if not newest:
        return Owner(0)
    try:
        read = json.loads((folder / _file_of(newest)).read_text(encoding="utf-8"))
        return replace(Owner(**read), generation=newest)
    except FileNotFoundError:  # a newer one has come
        return newest_owner(folder)
    except (OSError, ValueError, TypeError):
        return Owner(newest)


def _file_of(generation: int) -> str:
    return f"owner-{generation:05d}.json"


def _create(folder: AnyPath, owner: Owner) -> bool:
    """Create the owner's record; False where another job has created one of this generation."""
    path = folder / _file_of(owner.generation)
    return create_exclusively(path, json.dumps(asdict(owner)), name=owner.id)


def _generations(folder: AnyPath) -> list[int]:
    matches = (_OWNER.fullmatch(path.name) for path in files_in(folder))
    return [int(match[1]) for match in matches if match]


def _machine() -> tuple[str, str]:
    """(this boot of this machine, this container in it); empty where the system has no /proc."""
    boot = container = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        container = os.readlink("/proc/self/ns/pid")
    return boot, container


def _started(pid: int) -> str:
    """When a process started, in clock ticks since the boot; empty if unknown."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    state, *fields = stat.rpartition(")")[2].split()  # the name before it may contain anything
    return "" if state in "ZX" else fields[18]
