"""The optimizers of a model: the compiled one, and those that a step of its own uses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras

from tfdist_ext.errors import TrainingError

__all__ = ["all_built", "check_built", "optimizers_of", "with_inner"]


def optimizers_of(model: keras.Model) -> dict[str, Any]:
    """Attribute -> optimizer, also of those in an attribute that is a list or a dict."""
    found: dict[int, tuple[str, Any]] = {}
    for attribute, value in vars(model).items():
        if attribute.startswith("_self_"):
            continue  # TensorFlow's list of what is tracked, under other names
        for name, optimizer in _optimizers_in(attribute, value):
            found.setdefault(id(optimizer), (name, optimizer))
    return dict(found.values())


def with_inner(optimizer: Any) -> list[Any]:
    """An optimizer and those that it holds, as loss scaling and lookahead do."""
    inner = [each for held in optimizers_of(optimizer).values() for each in with_inner(held)]
    return list({id(each): each for each in (optimizer, *inner)}.values())


def all_built(model: keras.Model) -> bool:
    """Whether every optimizer of the model has its variables."""
    return all(optimizer.built for optimizer in optimizers_of(model).values())


def check_built(model: keras.Model) -> None:
    """Raises a TrainingError that names an optimizer without variables."""
    for name, optimizer in optimizers_of(model).items():
        if not optimizer.built:
            raise TrainingError(
                f"the optimizer {type(model).__name__}.{name} has no variables yet, and a step"
                " cannot make them: call its build(variables it trains) in the function given to"
                " distribute(), after the model is built."
            )


def _optimizers_in(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, keras.optimizers.Optimizer):
        yield name, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _optimizers_in(f"{name}.{key}", inner)
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from _optimizers_in(f"{name}.{number}", inner)
