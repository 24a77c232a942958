"""Checkpoints: the whole state of a model in one file, restored on any strategy from any other.

In a cluster the chief writes and reads, and the others wait and take over its state. So a folder
on the chief's own disk is enough, and no task can come upon another file than the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from pathlib import Path

import keras
import numpy as np

from tfdist_ext.errors import TrainingError
from tfdist_ext.training.chiefs_part import done_by_chief, follow_chief, text_from_chief
from tfdist_ext.training.protocols import Reduction
from tfdist_ext.training.saving.checkpoint_file import CheckpointFile, write_checkpoint
from tfdist_ext.training.saving.checkpoint_index import (
    Progress,
    finished_checkpoints,
    training_is_done,
)
from tfdist_ext.training.saving.checkpoint_state import kinds_of, matching, state_of
from tfdist_ext.training.saving.complete_files import replaced_when_complete
from tfdist_ext.training.saving.whole_values import assign_rows, blocks

__all__ = [
    "Progress",
    "finished_checkpoints",
    "restore_checkpoint",
    "save_checkpoint",
    "training_is_done",
]


def save_checkpoint(
    model: keras.Model,
    reduction: Reduction,
    path: Path,
    progress: Progress,
    *,
    place: Callable[[Path], AbstractContextManager[Path]] = replaced_when_complete,
    attributes: Mapping[str, int | str] | None = None,
) -> Progress:
    """Write the model's state to one file; every task must call, and returns when it is there.

    Args:
        place: on the chief: gives the file to write to, and puts it where it belongs.
        attributes: on the chief: what else is written into the file.

    Returns:
        The progress that was saved, its step that of the optimizer.

    Raises:
        TrainingError: the model has no variables, or `path` is a folder.
        OSError: the file cannot be written.
    """
    _check_has_variables(model, "save_checkpoint")
    optimizer = getattr(model, "optimizer", None)  # there is none before compile
    if optimizer is not None:
        progress = replace(progress, step=int(optimizer.iterations.numpy()))
    done_by_chief(
        reduction,
        lambda: write_checkpoint(
            path,
            state_of(model),
            kinds_of(model),
            {**asdict(progress), **(attributes or {})},
            place,
        ),
        f"write the checkpoint {path}",
    )
    return progress


def restore_checkpoint(model: keras.Model, reduction: Reduction, path: Path) -> Progress:
    """Give the model the state that a checkpoint holds; every task must call.

    Raises:
        TrainingError: on every task: there is no such checkpoint, it is none or a part of one, is
            damaged, or is one of another model or of another optimizer; nothing is changed then.
            Or the model has no variables yet.
    """
    _check_has_variables(model, "restore_checkpoint")
    progress, data = list(Progress().numbers.values()), ""

    def read() -> None:
        with CheckpointFile(path) as file:
            pairs = matching(file, model, path)
            numbers = [file.number(name) for name in Progress().numbers]
            of_data = file.text("data")
            file.verify()  # nothing is changed before all is known to be good
            for saved, variable in pairs:
                for start, stop in blocks(variable):
                    assign_rows(variable, start, file.rows(saved, start, stop))
            progress[:] = numbers
            nonlocal data
            data = of_data

    done_by_chief(reduction, read, f"read the checkpoint {path}")
    follow_chief(model, reduction)
    numbers = reduction.from_chief(np.array(progress, np.int64)).tolist()
    return replace(Progress(*numbers), data=text_from_chief(reduction, data))


def _check_has_variables(model: keras.Model, call: str) -> None:
    if not model.built:
        raise TrainingError(
            f"{call}() needs the model's variables, and {model.name!r} has none yet: begin it with"
            " keras.Input(shape), or call build(), fit() or predict() first."
        )
