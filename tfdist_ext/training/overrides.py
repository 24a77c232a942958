"""Models that override methods of Keras's trainer, as KerasHub's tasks override `fit`.

Such a `fit` prepares the data or the callbacks and calls `super().fit(...)`. Under a strategy it is
called as it is, and what `super()` reaches is the distributed implementation: while the method
runs, `keras.Model.fit` itself is one that asks whether it is this thread's model.
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
from tfdist_ext.training.replaced import Target, functions_in_place, substitute_of, substitutes

__all__ = ["overridable", "overrides", "redirected_method"]

# What a model's class may override and call by super().
TRAINER_METHODS = (
    "fit",
    "evaluate",
    "predict",
    "train_on_batch",
    "test_on_batch",
    "predict_on_batch",
)

_TARGETS = [Target(name, keras.Model, name) for name in TRAINER_METHODS]

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
    """Scope in which `fit`, ... of `keras.Model` do on this model what the DistributedModel's do.

    Args:
        instead: other implementations, by name.
    """

    def called(
        name: str, outer: Any, original: Any, model: keras.Model, *args: Any, **kwargs: Any
    ) -> Any:
        if model is not distributed.keras_model:  # another one, in a method of this one's
            unchanged = original if outer is None else functools.partial(outer, original)
            return unchanged(model, *args, **kwargs)
        return (instead.get(name) or _implementation(distributed, name))(*args, **kwargs)

    functions = {
        name: functools.partial(called, name, substitute_of(name)) for name in TRAINER_METHODS
    }
    with functions_in_place(_TARGETS), substitutes(functions):
        yield


def _implementation(distributed: Any, name: str) -> Callable[..., Any]:
    return types.MethodType(getattr(type(distributed), name), distributed)
