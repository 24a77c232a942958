"""Models that override methods of Keras's trainer, as KerasHub's tasks override `fit`.

Such a `fit` prepares the data or the callbacks and calls `super().fit(...)`. Under a strategy it is
called as it is, and what `super()` reaches is the distributed implementation.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import keras

from tfdist_ext.errors import TrainingError
from tfdist_ext.training._keras_hooks import replace_trainer

__all__ = ["overridable", "overrides", "redirected_method"]

_ATTRIBUTE = "_tfdist_trainer"  # of a Keras model, while a method of its own runs

Method = TypeVar("Method", bound=Callable[..., Any])


def overrides(model: keras.Model, name: str) -> bool:
    """Whether the model's class has its own `fit`, `evaluate`, ... in place of `keras.Model`'s."""
    return getattr(type(model), name) is not getattr(keras.Model, name)


def overridable(method: Method) -> Method:
    """Decorator for methods of a DistributedModel that take the place of `keras.Model`'s.

    Where the Keras model's class overrides the method, that one is called, with the arguments as
    they were given, and `method` is what its `super()` call reaches. Arguments that only `method`
    has, and the model's own method has not, are kept for that call.
    """
    return _Overridable(method)  # type: ignore[return-value]


def redirected_method(distributed: Any, method: Callable[..., Any]) -> Callable[..., Any]:
    """The method of a Keras model; its own calls of `self.fit`, `self.predict`, ... distribute."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _trained_by(distributed):
            return method(*args, **kwargs)

    return call


class _Overridable:
    """A descriptor, so that a method that nothing overrides is called without a detour."""

    def __init__(self, method: Callable[..., Any]):
        self.method = method
        self.__doc__ = method.__doc__

    def __get__(self, distributed: Any, owner: Any = None) -> Any:
        if distributed is None:
            return self.method
        bound = types.MethodType(self.method, distributed)
        if not overrides(distributed.keras_model, self.method.__name__):
            return bound
        return functools.wraps(bound)(functools.partial(_call_own, distributed, bound))


def _call_own(distributed: Any, bound: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    model, name = distributed.keras_model, bound.__name__
    own = getattr(type(model), name)
    of_keras = inspect.signature(getattr(keras.Model, name)).parameters
    known = {*of_keras, *inspect.signature(own).parameters}
    ours = {key for key in inspect.signature(bound).parameters if not key.startswith("_")}
    kept = {key: kwargs.pop(key) for key in list(kwargs) if key in ours - known}
    calls = 0

    def base(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 1 and any(value is not None for value in kept.values()):
            raise TrainingError(
                f"{', '.join(kept)} must belong to one training, got a second: {name}() of"
                f" {type(model).__name__} calls super().{name}() again. Let it take the argument"
                " itself, and pass another value to each call."
            )
        return bound(*args, **{**kept, **kwargs})

    with _trained_by(distributed, **{name: base}):
        return own(model, *args, **kwargs)


@contextlib.contextmanager
def _trained_by(distributed: Any, **instead: Callable[..., Any]) -> Iterator[None]:
    """Scope in which `keras.Model.fit`, ... do on this model what the DistributedModel's do."""
    attributes = vars(distributed.keras_model)  # not setattr: Keras tracks what is set
    before = attributes.get(_ATTRIBUTE)
    attributes[_ATTRIBUTE] = lambda name: instead.get(name) or _implementation(distributed, name)
    try:
        yield
    finally:
        attributes.pop(_ATTRIBUTE)
        if before is not None:
            attributes[_ATTRIBUTE] = before


def _implementation(distributed: Any, name: str) -> Callable[..., Any]:
    return types.MethodType(getattr(type(distributed), name), distributed)


def _instead(model: keras.Model, name: str) -> Callable[..., Any] | None:
    lookup = vars(model).get(_ATTRIBUTE)
    return None if lookup is None else lookup(name)


replace_trainer(_instead)
