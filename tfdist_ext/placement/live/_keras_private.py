"""The private names of Keras that placement uses, each with the reason."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import keras

from tfdist_ext.errors import PlacementError
from tfdist_ext.private_names import PrivateNames

__all__ = [
    "NAMES",
    "attributes_set",
    "fresh_names",
    "leaving_no_names",
    "optimizer_behind",
    "variable_behind",
]

NAMES = PrivateNames(
    "keras.src",
    PlacementError,
    {"backend.common.global_state.GLOBAL_STATE_TRACKER": "the names of layers in a plan"},
)

_COUNTERS = "object_name_uids"  # of automatic names
_SEEDS = "global_seed_generator"  # used by functions that draw without a seed


@contextlib.contextmanager
def attributes_set(owner: Any, **values: Any) -> Iterator[None]:
    """Scope in which attributes of a module or an object have other values."""
    before = {name: getattr(owner, name, None) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


@contextlib.contextmanager
def fresh_names() -> Iterator[None]:
    """Scope in which layers get the names that they would get in a new process.

    Private because Keras can only forget its counters for good (clear_session).
    """
    tracker = NAMES("backend.common.global_state.GLOBAL_STATE_TRACKER")
    counters: dict[str, int] = defaultdict(int, getattr(tracker, _COUNTERS, None) or {})
    setattr(tracker, _COUNTERS, None)
    try:
        yield
    finally:
        for name, count in (getattr(tracker, _COUNTERS, None) or {}).items():
            counters[name] = max(counters[name], count)
        setattr(tracker, _COUNTERS, counters)


def leaving_no_names() -> contextlib.AbstractContextManager[None]:
    """Scope with fresh names, after which Keras has the same state as before."""
    tracker = NAMES("backend.common.global_state.GLOBAL_STATE_TRACKER")
    return attributes_set(tracker, **{_COUNTERS: None, _SEEDS: None})


def variable_behind(initial_value: Any) -> tuple[keras.Variable, Callable[..., Any]] | None:
    """(variable, initializer) of Keras behind an initial value that TensorFlow is given.

    Private because Keras gives TensorFlow a function without arguments, and neither shape nor
    path. Only the closure of this function refers to the Keras variable.

    Returns:
        None if the value does not come from Keras.
    """
    held = _closed_over_by(initial_value)
    variable, initializer = held.get("self"), held.get("initializer")
    if isinstance(variable, keras.Variable) and callable(initializer):
        return variable, initializer
    return None


def optimizer_behind(update: Callable[..., Any]) -> keras.optimizers.Optimizer | None:
    """The optimizer that gave a strategy this update of a variable; None if no optimizer did.

    Private because a strategy is given a function, and only its closure refers to the optimizer.
    """
    optimizer = _closed_over_by(update).get("self")
    return optimizer if isinstance(optimizer, keras.optimizers.Optimizer) else None


def _closed_over_by(function: Any) -> dict[str, Any]:
    code = getattr(function, "__code__", None)
    cells = getattr(function, "__closure__", None)
    if code is None or not cells:
        return {}
    return dict(zip(code.co_freevars, (cell.cell_contents for cell in cells), strict=True))
