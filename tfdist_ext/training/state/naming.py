"""Names all variables of a model and its optimizers; the names are the same in every job.

Keras counts names in the whole process: a layer is `dense` in one job and `dense_3` in the next.
Here the numbers count within the layer or model that holds the parts.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TypeVar

import keras

from tfdist_ext.errors import TrainingError
from tfdist_ext.training import _keras_private as kp
from tfdist_ext.training.variables import optimizers_of, with_inner_optimizers

__all__ = ["METRICS", "MODEL", "check_has_variables", "group_of", "state_of"]

MODEL, METRICS = "model", "metrics"  # all other groups are optimizers

_NUMBERED = re.compile(r"(.*?)(?:_(\d+))?", re.S)

_Part = TypeVar("_Part")


def state_of(model: keras.Model) -> dict[str, keras.Variable]:
    """Returns `group/name` -> variable, of the model, the metrics, and each optimizer.

    A model has weights, moving statistics, counters and states of seed generators. An optimizer
    has slots, its counter of steps, a learning rate that is not a schedule, and a loss scale.
    The group of an optimizer has the attribute and the class, such as `optimizer.Adam`.
    """
    named = [
        (f"{METRICS}/{metric_name}/{name}", variable)
        for metric_name, metric in _renumbered((each.name, each) for each in model.metrics)
        for name, variable in _renumbered((each.name, each) for each in metric.variables)
    ]
    named += _variables_in(model, f"{MODEL}/")
    # Metrics are parts of the model, too, and a shared layer counts where it comes first.
    by_id = {id(variable): (name, variable) for name, variable in reversed(named)}
    state = dict(reversed(by_id.values()))
    slots = {  # an optimizer names its slots after the variables it trains
        variable.path.replace("/", "_"): name.partition("/")[2].replace("/", "_")
        for name, variable in state.items()
    }
    for attribute, optimizer in optimizers_of(model).items():
        if optimizer.built:
            kinds = [type(each).__name__ for each in with_inner_optimizers(optimizer)]
            group = ".".join([attribute.replace("/", "_"), *kinds])
            named = [(_slot_name(each.name, slots), each) for each in optimizer.variables]
            state |= {f"{group}/{name}": variable for name, variable in _renumbered(named)}
    return {name: each for name, each in state.items() if kp.raw_value(each) is not None}


def group_of(name: str) -> str:
    """Returns the group of a name of `state_of`."""
    return name.partition("/")[0]


def check_has_variables(model: keras.Model, call: str) -> None:
    """Raises TrainingError if the model has no variables yet."""
    if not model.built:
        raise TrainingError(
            f"the model must have variables before {call}(), got {model.name!r} without. Begin it"
            " with keras.Input(shape), or call build(), fit() or predict() first."
        )


def _variables_in(layer: keras.Layer, parent: str) -> Iterator[tuple[str, keras.Variable]]:
    """Yields (path, variable); the path is the variable's place in the model.

    The variable's own path says where its layer was built, and may differ in a copy.
    """
    inner = kp.flat_layers(layer, recursive=False, include_self=False)
    of_inner = {id(variable) for part in inner for variable in part.variables}
    own = [(each.name, each) for each in layer.variables if id(each) not in of_inner]
    for name, variable in _renumbered(own):
        yield parent + name, variable
    for name, part in _renumbered((each.name, each) for each in inner):
        yield from _variables_in(part, f"{parent}{name}/")


def _renumbered(parts: Iterable[tuple[str, _Part]]) -> Iterator[tuple[str, _Part]]:
    """Yields (new name, part): `dense_7` and `dense_9` become `dense` and `dense#1`."""
    split = []
    for name, part in parts:
        match = _NUMBERED.fullmatch(name)
        assert match is not None  # it matches anything
        split.append((match[1], int(match[2] or 0), part))
    seen: Counter[str] = Counter()
    for word, _, part in sorted(split, key=lambda each: each[:2]):
        yield f"{word}#{seen[word]}" if seen[word] else word, part
        seen[word] += 1


def _slot_name(name: str, slots: dict[str, str]) -> str:
    path = max((each for each in slots if name.startswith(f"{each}_")), key=len, default="")
    return slots.get(path, "") + name.removeprefix(path)
