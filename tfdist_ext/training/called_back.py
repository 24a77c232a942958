"""What a callback's `self.model` does while a training runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras

__all__ = ["calls_go_to"]


@contextlib.contextmanager
def calls_go_to(model: keras.Model, **methods: Callable[..., Any]) -> Iterator[None]:
    """Scope in which these methods of a Keras model are others.

    Callbacks get the Keras model, and may call its `evaluate` and `predict`, whose own loops
    would fail or be wrong on a strategy.
    """
    attributes = vars(model)
    before = {name: attributes[name] for name in methods if name in attributes}
    attributes.update(methods)
    try:
        yield
    finally:
        for name in methods:
            del attributes[name]
        attributes.update(before)
