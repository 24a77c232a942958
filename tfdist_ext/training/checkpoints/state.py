"""What belongs to the state of a model and its optimizers, and names for it that hold in every job.

Keras numbers names by what the process has made before: a layer is `dense` in one job and
`dense_3` in the next. Here the numbers count within the model.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import keras

from tfdist_ext.errors import TrainingError
from tfdist_ext.training import _keras_private as kp
from tfdist_ext.training.checkpoints.file import CheckpointFile, Saved
from tfdist_ext.training.variables import optimizers_of

__all__ = ["MODEL", "kinds_of", "matching", "state_of"]


MODEL, METRICS = "model", "metrics"


_NUMBERED = re.compile(r"(.*?)(?:_(\d+))?$", re.S)


_SHOWN = 6


def state_of(model: keras.Model) -> dict[str, dict[str, keras.Variable]]:
    """Group -> name -> Keras variable: the model's, the metrics', and those of each optimizer.

    The model's are weights, moving statistics, counters and the states of seed generators; an
    optimizer's are its slots, its counter of steps, a learning rate that is no schedule, and a
    loss scale.
    """
    metrics = [variable for metric in model.metrics for variable in metric.variables]
    known = {id(variable) for variable in metrics}
    own = _named((path, v) for path, v in _paths_in(model) if _has_value(v) and id(v) not in known)
    state = {MODEL: own, METRICS: _named((v.path, v) for v in metrics if _has_value(v))}
    for name, optimizer in _optimizers(model).items():
        state[name] = _named_in_optimizer(filter(_has_value, optimizer.variables), own)
    return state


def kinds_of(model: keras.Model) -> dict[str, str]:
    """Group -> class, of what cannot be restored into another class: the optimizers."""
    return {name: _class_of(optimizer) for name, optimizer in _optimizers(model).items()}


def matching(
    file: CheckpointFile, model: keras.Model, path: str | Path
) -> list[tuple[Saved, keras.Variable]]:
    """(saved variable, the model's variable) of all that is to be restored.

    A model that is not compiled takes no optimizer's state; metrics take what there is of theirs.

    Raises:
        TrainingError: another model, or another optimizer.
    """
    state = state_of(model)
    pairs = _pairs(
        file.variables(MODEL),
        state[MODEL],
        f"{path} must be a checkpoint of this model, got one of another model",
    )
    for name, kind in kinds_of(model).items():
        saved_kind = file.kind(name)
        if saved_kind is None:
            continue  # the model that was saved was not compiled: there is nothing to restore
        if saved_kind != kind:
            raise TrainingError(
                f"{path} must have the state of {kind}, the optimizer of the model, got that of"
                f" {saved_kind}: compile with {saved_kind}; or restore the weights alone, before"
                " compile()."
            )
        pairs += _pairs(
            file.variables(name),
            state[name],
            f"{path} must have the state of this {kind}, got that of one with other slots, or set"
            " up differently",
        )
    metrics = file.variables(METRICS)
    for name, variable in state[METRICS].items():
        saved = metrics.get(name)
        if saved is not None and saved.shape == tuple(variable.shape):
            pairs.append((saved, variable))
    return pairs


def _paths_in(layer: keras.Layer, parent: str = "") -> Iterator[tuple[str, keras.Variable]]:
    """(path, variable) by where a variable is in the model.

    The variable's own path says where its layer was built, which is another place in a copy.
    """
    inner = kp.inner_layers(layer)
    of_inner = {id(variable) for part in inner for variable in part.variables}
    for variable in layer.variables:
        if id(variable) not in of_inner:
            yield parent + variable.name, variable
    for part in inner:
        yield from _paths_in(part, f"{parent}{part.name}/")


def _named(paths: Iterable[tuple[str, keras.Variable]]) -> dict[str, keras.Variable]:
    """Name -> variable; two of one path are told apart by their order."""
    variables = {id(variable): (path, variable) for path, variable in reversed(list(paths))}
    pairs = list(reversed(variables.values()))  # a shared layer counts where it comes first
    renamed = _renamed([path for path, _ in pairs])
    return _told_apart((renamed[path], variable) for path, variable in pairs)


def _renamed(paths: list[str]) -> dict[str, str]:
    """Path -> the same with `dense_7` and `dense_9` called `dense` and `dense_1`, at each level."""
    numbers: dict[tuple[str, str], set[int]] = {}  # (parent, word) -> numbers in use
    for path in paths:
        for parent, word, number in _levels(path):
            numbers.setdefault((parent, word), set()).add(number)

    def rename(path: str) -> str:
        parts = []
        for parent, word, number in _levels(path):
            place = sorted(numbers[parent, word]).index(number)
            parts.append(f"{word}_{place}" if place else word)
        return "/".join(parts)

    return {path: rename(path) for path in paths}


def _levels(path: str) -> Iterable[tuple[str, str, int]]:
    parent = ""
    for part in path.split("/"):
        match = _NUMBERED.match(part)
        assert match is not None  # it matches anything
        yield parent, match[1], int(match[2] or 0)
        parent += part + "/"


def _named_in_optimizer(
    variables: Iterable[keras.Variable], own: Mapping[str, keras.Variable]
) -> dict[str, keras.Variable]:
    """Name -> variable; an optimizer names its variables by the paths of those that it trains."""
    trained = {v.path.replace("/", "_"): name.replace("/", "_") for name, v in own.items()}
    longest_first = sorted(trained, key=len, reverse=True)

    def name_of(variable: keras.Variable) -> str:
        name = variable.path.rsplit("/", 1)[-1]
        path = next((path for path in longest_first if name.startswith(f"{path}_")), None)
        return name if path is None else trained[path] + name.removeprefix(path)

    return _told_apart((name_of(variable), variable) for variable in variables)


def _told_apart(named: Iterable[tuple[str, keras.Variable]]) -> dict[str, keras.Variable]:
    seen: Counter[str] = Counter()
    result = {}
    for name, variable in named:
        result[f"{name}#{seen[name]}" if seen[name] else name] = variable
        seen[name] += 1
    return result


def _optimizers(model: keras.Model) -> dict[str, keras.optimizers.Optimizer]:
    """Attribute -> optimizer; a model with a step of its own may have several."""
    return {
        name.replace("/", "_"): optimizer  # the name of a group in an HDF5 file
        for name, optimizer in optimizers_of(model).items()
        if optimizer.built
    }


def _class_of(optimizer: keras.optimizers.Optimizer) -> str:
    inner = getattr(optimizer, "inner_optimizer", None)
    name = type(optimizer).__name__
    return name if inner is None else f"{name} of {type(inner).__name__}"


def _has_value(variable: keras.Variable) -> bool:
    return kp.raw_value(variable) is not None


def _pairs(
    saved: Mapping[str, Saved], here: Mapping[str, keras.Variable], what: str
) -> list[tuple[Saved, keras.Variable]]:
    missing = [variable.path for name, variable in here.items() if name not in saved]
    extra = [variable.path for name, variable in saved.items() if name not in here]
    pairs = [(saved[name], variable) for name, variable in here.items() if name in saved]
    other = [
        f"{new.path} (saved: {old.dtype} {old.shape}, here: {new.dtype} {tuple(new.shape)})"
        for old, new in pairs
        if old.shape != tuple(new.shape) or old.dtype != new.dtype
    ]
    found = {
        "the checkpoint lacks": missing,
        "only the checkpoint has": extra,
        "of another shape or dtype:": other,
    }
    differences = [f"{words} {_list(paths)}" for words, paths in found.items() if paths]
    if differences:
        raise TrainingError(f"{what}: {'; '.join(differences)}.")
    return pairs


def _list(paths: list[str]) -> str:
    more = f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else ""
    return ", ".join(paths[:_SHOWN]) + more
