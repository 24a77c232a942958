"""The index of a folder of checkpoints: which are finished, and whether the training is done.

It is a small JSON file, replaced at once: a reader on another machine sees the old or the new one.
Each checkpoint also says for itself what it is. So an index that is lost, damaged or not that of
the files is found out, and made again from them.
"""

from __future__ import annotations

import json
import re
import zlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tfdist_ext.errors import TrainingError
from tfdist_ext.training.saving.checkpoint_file import CheckpointFile
from tfdist_ext.training.saving.complete_files import local_path, replaced_when_complete
from tfdist_ext.training.saving.folder_owner import newest_owner

__all__ = ["Index", "Progress", "finished_checkpoints", "training_is_done"]

KEPT = 3
_MISSING = "is missing"
INDEX = "checkpoints.json"
_FORMAT = "tfdist_ext checkpoints 2"
_WITHOUT_CHECKSUM = "tfdist_ext checkpoints 1"  # before there were owners
# Other files may be here too, such as `epoch-01.weights.h5` of a callback.
_CHECKPOINT = re.compile(r"(epoch|last)-\d{5,}(-batch-\d{8,})?(-gen-\d{5,})?\.h5")


@dataclass(frozen=True)
class Progress:
    """How far a training has come.

    Attributes:
        epoch: epochs that are done, and so the number of the next one, counted from 0.
        step: global batches that are done, as the optimizer counts them.
        first_epoch: the epoch in which the data was at its beginning.
        seed: where the order of examples starts; 0 where none are shuffled.
        batches: global batches of the next epoch that are done already.
        data: the state of a ShardedDataset, as JSON; empty with other data.
    """

    epoch: int = 0
    step: int = 0
    first_epoch: int = 0
    seed: int = 0
    batches: int = 0
    data: str = ""

    @property
    def numbers(self) -> dict[str, int]:
        """The fields that are numbers, by name."""
        return {name: value for name, value in asdict(self).items() if name != "data"}


@dataclass
class Index:
    """What a folder of checkpoints holds.

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
    def read(cls, folder: Path) -> Index:
        """The index of a folder, for one who only reads; an empty one where there is none.

        Where the index is lost, damaged, or not of the newest job, it is what the files say.

        Raises:
            TrainingError: no checkpoint can be read, or they are of several trainings.
        """
        index, fault = cls.stored(folder)
        owner = newest_owner(folder)
        if fault is None and index.generation >= (owner.generation if owner else 0):
            return index
        found, damaged = _look_into_files(folder, verify=False)
        return _made_from(found, damaged, folder, owner.training if owner else "", index)[0]

    @classmethod
    def checked(cls, folder: Path) -> tuple[Index, list[str]]:
        """(the index of a folder, compared with its files; what was wrong with it, if anything).

        Where the two do not agree, the index is made again from the files whose checksums are
        right.

        Raises:
            TrainingError: no checkpoint can be read, or they are of several trainings.
        """
        index, fault = cls.stored(folder)
        owner = newest_owner(folder)
        training = owner.training if owner else ""
        found, damaged = _look_into_files(folder, verify=False)
        fault = fault or _disagreement(index, found, training)
        if fault is None:
            return index, index._forget_removed(folder)
        if not found and not damaged:
            return cls(), [] if fault == _MISSING else [f"{INDEX} {fault}"]
        found, damaged = _look_into_files(folder, verify=True)
        index, others = _made_from(found, damaged, folder, training, index)
        files = ", ".join([*index.checkpoints, *filter(None, [index.last_state])])
        return index, [f"{INDEX} {fault}", f"made again from {files}", *others]

    @classmethod
    def stored(cls, folder: Path) -> tuple[Index, str | None]:
        """(what the file says, None), or (an empty index, what is wrong with the file)."""
        try:
            return cls._of_text((folder / INDEX).read_text(encoding="utf-8")), None
        except FileNotFoundError:
            return cls(), _MISSING
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            return cls(), f"is damaged ({error or type(error).__name__})"

    def write(self, folder: Path) -> None:
        """Put it in the folder."""
        with replaced_when_complete(folder / INDEX) as unfinished:
            unfinished.write_text(self._as_text(), encoding="utf-8")

    def _as_text(self) -> str:
        content = {"format": _FORMAT, **asdict(self)}
        return json.dumps({**content, "crc32": _checksum(content)}, indent=1)

    @classmethod
    def _of_text(cls, text: str) -> Index:
        read = json.loads(text)
        if read["format"] != _WITHOUT_CHECKSUM:
            if read["format"] != _FORMAT:
                raise ValueError(f"format {read['format']!r}")
            if read.pop("crc32") != _checksum(read):
                raise ValueError("its checksum is wrong")
        del read["format"]
        read["checkpoints"] = {k: Progress(**v) for k, v in read["checkpoints"].items()}
        return cls(**read)

    def _forget_removed(self, folder: Path) -> list[str]:
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


def finished_checkpoints(directory: str | Path) -> list[Path]:
    """The complete checkpoints of `fit(checkpoint_dir=directory)`, the oldest first.

    Old ones are removed while the training goes on: the last few stay.
    """
    folder = local_path(directory)
    return [folder / name for name in Index.read(folder).checkpoints]


def training_is_done(directory: str | Path) -> bool:
    """Whether the fit that saves to `directory` has come to its end."""
    return Index.read(local_path(directory)).epochs_when_done is not None


@dataclass(frozen=True)
class _Found:
    """What a checkpoint says of itself."""

    progress: Progress
    training: str
    generation: int
    epochs_when_done: int  # 0: it is not the state at the end of a fit

    @property
    def of_epoch(self) -> bool:
        """Whether a training goes on from it."""
        return not self.epochs_when_done

    @property
    def order(self) -> tuple[int, int, int]:
        """By jobs, and by progress in each: an older job may have been ahead."""
        return self.generation, self.progress.epoch, self.progress.batches


def _checksum(content: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def _look_into_files(
    folder: Path, *, verify: bool
) -> tuple[dict[str, _Found], dict[str, TrainingError]]:
    """(name -> checkpoint, name -> why it cannot be read).

    Args:
        verify: compare the checksums of all values; else only the attributes are read.
    """
    found, damaged = {}, {}
    for path in sorted(folder.glob("*.h5")):
        if not _CHECKPOINT.fullmatch(path.name):
            continue
        try:
            with CheckpointFile(path) as file:
                progress = Progress(
                    **{name: file.number(name) for name in Progress().numbers},
                    data=file.text("data"),
                )
                found[path.name] = _Found(
                    progress,
                    file.text("training"),
                    file.number("generation"),
                    file.number("epochs_when_done"),
                )
                if verify:
                    file.verify()
        except TrainingError as error:
            found.pop(path.name, None)
            if path.exists():  # it was not removed meanwhile, by the job that writes here
                damaged[path.name] = error
    return found, damaged


def _disagreement(index: Index, found: dict[str, _Found], training: str) -> str | None:
    """Why an index cannot be the one of these files; None where it may be."""
    if training and index.training and training != index.training:
        return "is of another training"
    for name, listed in index.checkpoints.items():
        file = found.get(name)
        if file is None:
            continue
        if file.progress.numbers != listed.numbers or (
            index.training and file.training not in ("", index.training)
        ):
            return f"does not describe {name}"
    known = {*index.checkpoints, index.last_state}
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
    found: dict[str, _Found],
    damaged: dict[str, TrainingError],
    folder: Path,
    training: str,
    stored: Index,
) -> tuple[Index, list[str]]:
    """(an index of these files, what to say of those that are left alone).

    Args:
        training: whose files they are by the folder's owner; empty where nobody knows.
        stored: the index that was there, which may tell as well.
    """
    if not found and damaged:
        raise TrainingError(
            f"{folder} has no usable {INDEX} and no checkpoint that can be read:"
            f" {'; '.join(str(error) for error in damaged.values())} Move these files away to start"
            " the training anew, or give another folder."
        )
    trainings: dict[str, list[str]] = {}
    for name, file in found.items():
        trainings.setdefault(file.training, []).append(name)
    known = [one for one in (training, stored.training) if one and one in trainings]
    if not known and len(trainings) > 1:
        groups = " and ".join(f"({', '.join(names)})" for names in trainings.values())
        raise TrainingError(
            f"{folder} must hold the checkpoints of one training, got those of {len(trainings)}:"
            f" {groups}, and no usable {INDEX} that says which one goes on. Move all but one away."
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
    left = [f"{name} is damaged and stays as it is" for name in damaged]
    left += [
        f"{', '.join(others)} of another training left alone"
        for one, others in trainings.items()
        if one != chosen
    ]
    return index, left
