"""What a callback's `self.model` does while a training runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras

__all__ = ["called_back_as", "calls_go_to"]

_WRITING_METHODS = ("export", "save", "save_weights")


def called_back_as(distributed: Any, model: keras.Model, *, is_chief: bool) -> Any:
    """Scope in which the Keras model that callbacks get does as its `DistributedModel`.

    Its own `evaluate` and `predict` would fail or be wrong on a strategy. Its own `save`,
    `save_weights` and `export` would write the same files on all tasks at once: on those that are
    not the chief they return without doing anything. No task waits there for the chief, as other
    tasks may not run the callback.
    """
    others = {} if is_chief else dict.fromkeys(_WRITING_METHODS, _nothing)
    return calls_go_to(model, evaluate=distributed.evaluate, predict=distributed.predict, **others)


@contextlib.contextmanager
def calls_go_to(model: keras.Model, **methods: Callable[..., Any]) -> Iterator[None]:
    """Scope in which these methods of a Keras model are others."""
    attributes = vars(model)
    before = {name: attributes[name] for name in methods if name in attributes}
    attributes.update(methods)
    try:
        yield
    finally:
        for name in methods:
            del attributes[name]
        attributes.update(before)


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass
