"""The state of a training: how far it is, and which saved value belongs to which variable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import keras

from tfdist_ext.errors import TrainingError
from tfdist_ext.training.checkpoints.format import CheckpointFile, SavedArray
from tfdist_ext.training.state.naming import METRICS, MODEL, kinds_of, state_of

__all__ = ["Progress", "matching"]

_SHOWN = 6  # variables that a message names


@dataclass(frozen=True)
class Progress:
    """The progress of a training.

    Attributes:
        epoch: completed epochs, and so the number of the next one, counted from 0.
        step: completed global batches, as the optimizer counts them.
        first_epoch: the epoch in which the data was at its beginning.
        seed: where the order of examples starts; 0 if they are not shuffled.
        batches: completed global batches of the next epoch.
        batch_size: examples in each of them, if the data is arrays; else 0.
        data: the state of a ShardedDataset, as JSON; empty with other data.
        trained: the logs of the last epoch's training, as JSON, if its validation is still to be
            done; else empty.
    """

    epoch: int = 0
    step: int = 0
    first_epoch: int = 0
    seed: int = 0
    batches: int = 0
    batch_size: int = 0
    data: str = ""
    trained: str = ""

    def __str__(self) -> str:
        if self.batches:
            return f"batch {self.batches} of epoch {self.epoch + 1} (step {self.step})"
        before = ", before its validation" if self.trained else ""
        return f"epoch {self.epoch}{before} (step {self.step})"


def matching(
    file: CheckpointFile, model: keras.Model, path: str
) -> list[tuple[SavedArray, keras.Variable]]:
    """Returns (saved value, variable) of all variables to restore.

    A model that is not compiled takes no optimizer's state. Metrics take what the file has.

    Raises:
        TrainingError: another model, or another optimizer.
    """
    state = state_of(model)
    pairs = _pairs(
        file.group(MODEL),
        state[MODEL],
        f"{path} must be a checkpoint of this model, got one of another model",
    )
    for name, kind in kinds_of(model).items():
        saved_kind = file.metadata["kinds"].get(name)
        if saved_kind is None:
            continue  # the model that was saved was not compiled
        if saved_kind != kind:
            raise TrainingError(
                f"{path} must have the state of {kind}, the optimizer of the model, got that of"
                f" {saved_kind}: compile with {saved_kind}; or restore the weights alone, before"
                " compile()."
            )
        pairs += _pairs(
            file.group(name),
            state[name],
            f"{path} must have the state of this {kind}, got that of one with other slots, or set"
            " up differently",
        )
    metrics = file.group(METRICS)
    for name, variable in state[METRICS].items():
        saved = metrics.get(name)
        if saved is not None and saved.shape == tuple(variable.shape):
            pairs.append((saved, variable))
    return pairs


def _pairs(
    saved: Mapping[str, SavedArray], here: Mapping[str, keras.Variable], what: str
) -> list[tuple[SavedArray, keras.Variable]]:
    pairs = [(saved[name], variable) for name, variable in here.items() if name in saved]
    found = {
        "the checkpoint lacks": [name for name in here if name not in saved],
        "only the checkpoint has": [name for name in saved if name not in here],
        "of another shape or dtype:": [
            f"{new.path} (saved: {old.dtype} {old.shape}, here: {new.dtype} {tuple(new.shape)})"
            for old, new in pairs
            if old.shape != tuple(new.shape) or old.dtype != new.dtype
        ],
    }
    differences = [f"{words} {_shown(names)}" for words, names in found.items() if names]
    if differences:
        raise TrainingError(f"{what}: {'; '.join(differences)}.")
    return pairs


def _shown(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
