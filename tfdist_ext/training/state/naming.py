"""Names all variables of a model and its optimizers; the names are the same in every job.

Keras counts names in the whole process: a layer is `dense` in one job and `dense_3` in the next.
Here the numbers count within the model.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

import keras

from tfdist_ext.errors import TrainingError
from tfdist_ext.training import _keras_private as kp
from tfdist_ext.training.variables import optimizers_of

__all__ = ["MODEL", "check_has_variables", "kinds_of", "state_of"]

MODEL = "model"

_NUMBERED = re.compile(r"(.*?)(?:_(\d+))?$", re.S)


def state_of(model: keras.Model) -> dict[str, dict[str, keras.Variable]]:
    """Returns group -> name -> variable: of the model, the metrics, and each optimizer.

    A model has weights, moving statistics, counters and states of seed generators. An optimizer
    has slots, its counter of steps, a learning rate that is not a schedule, and a loss scale.
    """
    metrics = [variable for metric in model.metrics for variable in metric.variables]
    known = {id(variable) for variable in metrics}
    own = _named((path, v) for path, v in _paths_in(model) if _has_value(v) and id(v) not in known)
    state = {MODEL: own, "metrics": _named((v.path, v) for v in metrics if _has_value(v))}
    for name, optimizer in _optimizers(model).items():
        state[name] = _named_in_optimizer(filter(_has_value, optimizer.variables), own)
    return state


def kinds_of(model: keras.Model) -> dict[str, str]:
    """Returns group -> class, of the groups that only the same class can restore."""
    return {name: _class_of(optimizer) for name, optimizer in _optimizers(model).items()}


def check_has_variables(model: keras.Model, call: str) -> None:
    """Raises TrainingError if the model has no variables yet."""
    if not model.built:
        raise TrainingError(
            f"the model must have variables before {call}(), got {model.name!r} without. Begin it"
            " with keras.Input(shape), or call build(), fit() or predict() first."
        )


def _paths_in(layer: keras.Layer, parent: str = "") -> Iterator[tuple[str, keras.Variable]]:
    """Yields (path, variable); the path is the variable's place in the model.

    The variable's own path says where its layer was built, and may differ in a copy.
    """
    inner = kp.inner_layers(layer)
    of_inner = {id(variable) for part in inner for variable in part.variables}
    for variable in layer.variables:
        if id(variable) not in of_inner:
            yield parent + variable.name, variable
    for part in inner:
        yield from _paths_in(part, f"{parent}{part.name}/")


def _named(paths: Iterable[tuple[str, keras.Variable]]) -> dict[str, keras.Variable]:
    """Returns name -> variable; variables of the same path are numbered in their order."""
    variables = {id(variable): (path, variable) for path, variable in reversed(list(paths))}
    pairs = list(reversed(variables.values()))  # a shared layer counts where it comes first
    renamed = _renamed([path for path, _ in pairs])
    return _with_unique_names((renamed[path], variable) for path, variable in pairs)


def _renamed(paths: list[str]) -> dict[str, str]:
    """Returns path -> new path: `dense_7` and `dense_9` become `dense` and `dense_1`."""
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
    """Returns name -> variable; an optimizer names its slots after the variables it trains."""
    trained = {v.path.replace("/", "_"): name.replace("/", "_") for name, v in own.items()}
    longest_first = sorted(trained, key=len, reverse=True)

    def name_of(variable: keras.Variable) -> str:
        name = variable.path.rsplit("/", 1)[-1]
        path = next((path for path in longest_first if name.startswith(f"{path}_")), None)
        return name if path is None else trained[path] + name.removeprefix(path)

    return _with_unique_names((name_of(variable), variable) for variable in variables)


def _with_unique_names(named: Iterable[tuple[str, keras.Variable]]) -> dict[str, keras.Variable]:
    seen: Counter[str] = Counter()
    result = {}
    for name, variable in named:
        result[f"{name}#{seen[name]}" if seen[name] else name] = variable
        seen[name] += 1
    return result


def _optimizers(model: keras.Model) -> dict[str, keras.optimizers.Optimizer]:
    """Returns attribute -> optimizer; a model with its own step may have several."""
    return {
        name.replace("/", "_"): optimizer  # the name of a group in a file
        for name, optimizer in optimizers_of(model).items()
        if optimizer.built
    }


def _class_of(optimizer: keras.optimizers.Optimizer) -> str:
    inner = getattr(optimizer, "inner_optimizer", None)
    name = type(optimizer).__name__
    return name if inner is None else f"{name} of {type(inner).__name__}"


def _has_value(variable: keras.Variable) -> bool:
    return kp.raw_value(variable) is not None
