"""Functions of Keras and TensorFlow that do something else in the threads of a running step.

They are replaced because there is no other way in: Keras's losses, layers and optimizers call each
other, and the steps of users call them directly. `_keras_private.REPLACED` lists them, each with
its reason. They are in place only while a step is traced, or runs eagerly; other threads, and
nested code that is not to be changed, get the original then, too. (`overrides.py` does the same
while a model's own `fit` runs, for the `fit` that its `super()` reaches.)

What was called is noted, so that `passed.py` can tell when a release of Keras takes another way.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from tfdist_ext.training._keras_private import REPLACED, find

__all__ = [
    "Target",
    "functions_in_place",
    "own_targets",
    "step_targets",
    "substitute_of",
    "substitutes",
]


class Target(NamedTuple):
    """A function, or a property, that can be replaced.

    Attributes:
        key: what `substitutes` knows it by. Several functions may do the same job.
        owner: the class or module that holds it.
        name: its attribute there.
    """

    key: str
    owner: Any
    name: str


class _Step(threading.local):
    """What stands in for the originals in this thread: by key, `substitute(original, *args)`."""

    substitutes: Mapping[str, Callable[..., Any]] = MappingProxyType({})
    called: set[str] | None = None  # keys; None where nobody asks


class _InPlace(NamedTuple):
    """A function that is replaced now.

    Attributes:
        original: as it was found in the owner; of an inherited one, in a base.
        inherited: whether the owner itself had none.
        users: the scopes that need it in place.
    """

    original: Any
    inherited: bool
    users: set[object]


_step = _Step()
_lock = threading.RLock()  # Ctrl-C may come, and leave a scope, while this thread has it
_in_place: dict[tuple[Any, str], _InPlace] = {}  # by owner and name


@contextlib.contextmanager
def substitutes(
    functions: Mapping[str, Callable[..., Any]] | None, called: set[str] | None = None
) -> Iterator[None]:
    """Scope in which, in this thread, originals are replaced by the functions of their keys.

    Args:
        functions: called with the original and its arguments, beside those of the scope around
            this one; None: every original is itself.
        called: the keys of those that were called are added to it.
    """
    before = _step.substitutes, _step.called
    _step.substitutes = {} if functions is None else {**_step.substitutes, **functions}
    _step.called = called
    try:
        yield
    finally:
        _step.substitutes, _step.called = before


def substitute_of(key: str) -> Callable[..., Any] | None:
    """What stands in for the functions of a key in this thread now."""
    return _step.substitutes.get(key)


@contextlib.contextmanager
def functions_in_place(targets: Sequence[Target]) -> Iterator[None]:
    """Scope in which originals ask for their substitutes.

    Several threads may be inside at once. When the last one leaves, everything is as before.
    """
    user = object()
    try:
        for target in targets:
            _put_in_place(target, user)
        yield
    finally:
        _restore(targets, user)


def own_targets(kinds: Sequence[type], bases: Sequence[type], names: Sequence[str]) -> list[Target]:
    """What classes, and their bases above `bases`, define themselves under some names.

    What is called first in a step must be replaced, and calls that of Keras only then.
    """
    found = {}
    for kind in kinds:
        for owner in kind.__mro__:
            if owner in bases:
                break
            for name in names:
                if name in vars(owner):
                    found[owner, name] = Target(name, owner, name)
    return list(found.values())


@functools.cache
def step_targets() -> list[Target]:
    """Those of a step: what of `REPLACED` is there. `passed.py` misses what a step needs."""
    found = []
    for replaced in REPLACED:
        owner = find(replaced.module, replaced.owner)
        if owner is not None and hasattr(owner, replaced.name):
            found.append(Target(replaced.key, owner, replaced.name))
    return found


def _put_in_place(target: Target, user: object) -> None:
    key, owner, name = target
    with _lock:
        replaced = _in_place.get((owner, name))
        if replaced is None:
            original = inspect.getattr_static(owner, name)
            inherited = name not in vars(owner)
            replaced = _in_place[owner, name] = _InPlace(original, inherited, set())
            setattr(owner, name, _asking(key, original))
        replaced.users.add(user)


def _restore(targets: Sequence[Target], user: object) -> None:
    """Leave everything as it was, unless others need it; may be called again, after Ctrl-C."""
    try:
        for _, owner, name in targets:
            with _lock:
                replaced = _in_place.get((owner, name))
                if replaced is None:
                    continue
                replaced.users.discard(user)
                if replaced.users:
                    continue
                if not replaced.inherited:
                    setattr(owner, name, replaced.original)
                elif name in vars(owner):
                    delattr(owner, name)
                del _in_place[owner, name]
    except KeyboardInterrupt:
        _restore(targets, user)
        raise


def _asking(key: str, original: Any) -> Any:
    """In the place of an original: it asks which function this thread is to call."""
    if isinstance(original, property):
        return property(_function_asking(key, original.fget), doc=original.__doc__)
    return _function_asking(key, original)


def _function_asking(key: str, original: Any) -> Any:
    @functools.wraps(original)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        substitute = _step.substitutes.get(key)
        if substitute is None:
            return original(*args, **kwargs)
        if _step.called is not None:
            _step.called.add(key)
        return substitute(original, *args, **kwargs)

    return chosen
