"""The private names of Keras that placement uses, each with the reason."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist_ext.errors import PlacementError
from tfdist_ext.private_names import PrivateNames

_SHARDS = "the initial values of shards"
NAMES = PrivateNames(
    "keras.src",
    PlacementError,
    {
        "backend.common.global_state.GLOBAL_STATE_TRACKER": "the names of layers in a plan",
        "random.seed_generator.draw_seed": _SHARDS,
        "backend.tensorflow.random._cast_seed": _SHARDS,
        "initializers.random_initializers.compute_fans": _SHARDS,
    },
)

_COUNTERS = "object_name_uids"  # of automatic names
_SEEDS = "global_seed_generator"  # used by functions that draw without a seed


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


@contextlib.contextmanager
def leaving_no_names() -> Iterator[None]:
    """Scope with fresh names, after which Keras has the same state as before."""
    tracker = NAMES("backend.common.global_state.GLOBAL_STATE_TRACKER")
    before = {name: getattr(tracker, name, None) for name in (_COUNTERS, _SEEDS)}
    vars(tracker).update(dict.fromkeys(before))
    try:
        yield
    finally:
        vars(tracker).update(before)


def next_seed(initializer: keras.Initializer) -> tf.Tensor:
    """The seed with which an initializer draws next. Private: public functions draw values."""
    seed = NAMES("random.seed_generator.draw_seed")(initializer.seed)
    return NAMES("backend.tensorflow.random._cast_seed")(seed)


def fans_of(initializer: keras.Initializer, shape: tuple[int, ...]) -> tuple[float, float]:
    """The numbers of inputs and outputs of a kernel. Private: the rules have no public name."""
    axes = {"input_axes", "output_axes"} & vars(initializer).keys()  # of newer releases
    named = {name: getattr(initializer, name) for name in axes}
    return NAMES("initializers.random_initializers.compute_fans")(shape, **named)


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
