"""The state of callbacks in a checkpoint.

Keras's callbacks start from nothing in each `fit`: how long EarlyStopping has waited, the best loss
so far, the history. So a checkpoint has their state. A user's callback gives its state with
`get_state()`, and takes it back with `set_state(state)` after its `on_train_begin`. A state holds
numbers, texts, NumPy arrays, and lists and dicts of them.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import keras
import numpy as np

from tfdist_ext.errors import TrainingError
from tfdist_ext.messages import shown
from tfdist_ext.training import _keras_private
from tfdist_ext.user_frames import warn

Callback: TypeAlias = keras.callbacks.Callback

# What Keras's fit, evaluate and predict take as callbacks.
Callbacks: TypeAlias = Callback | keras.callbacks.CallbackList | Sequence[Callback] | None

# "state": JSON as bytes; the arrays in it by their numbers.
CallbackState: TypeAlias = dict[str, np.ndarray]

_JSON = "state"
_ARRAY = "array of the state"  # the key of {_ARRAY: "3"} in the JSON

# Settings that distinguish two callbacks of one class, in this job and in the next.
_SETTINGS = ("monitor", "filepath", "filename", "log_dir")


def callback_state(callbacks: Iterable[Callback]) -> CallbackState:
    """Returns the state of callbacks.

    Raises:
        TrainingError: a `get_state` returns something that cannot be stored.
    """
    arrays: CallbackState = {}
    states = {name: _saved_state(callback, name, arrays) for name, callback in _named(callbacks)}
    return {_JSON: np.frombuffer(json.dumps(states).encode(), np.uint8), **arrays}


def restore_callbacks(state: CallbackState, callbacks: Iterable[Callback]) -> None:
    """Gives callbacks their state, after their `on_train_begin`.

    A callback that was not there when the state was saved starts from nothing.
    """
    saved = _read(state)
    for name, callback in _named(callbacks):
        if (values := saved.get(name)) is None:
            continue
        for attribute, value in values["known"].items():
            setattr(callback, attribute, value)
        if "own" in values and hasattr(callback, "set_state"):
            callback.set_state(values["own"])


def continue_log_files(state: CallbackState, callbacks: Iterable[Callback]) -> None:
    """Before `on_train_begin`: cuts the file of each CSVLogger after the checkpoint's last row."""
    saved = _read(state)
    for name, callback in _named(callbacks):
        if isinstance(callback, keras.callbacks.CSVLogger) and name in saved:
            callback.append = True
            path = Path(callback.filename)
            if path.is_file() and path.stat().st_size > saved[name]["bytes"]:
                os.truncate(path, saved[name]["bytes"])


def _named(callbacks: Iterable[Callback]) -> Iterator[tuple[str, Callback]]:
    """Yields (name, callback); a name has the class, its settings, and #1 for the second one."""
    seen: Counter[str] = Counter()
    for callback in callbacks:
        settings = [Path(str(getattr(callback, setting, ""))).name for setting in _SETTINGS]
        name = " ".join([type(callback).__qualname__, *filter(None, settings)])
        yield (f"{name}#{seen[name]}" if seen[name] else name), callback
        seen[name] += 1


def _saved_state(callback: Callback, name: str, arrays: CallbackState) -> dict[str, Any]:
    known = {}
    for attribute in _keras_private.remembered_by(callback):
        try:
            known[attribute] = _stored(getattr(callback, attribute, None), arrays, name)
        except TrainingError as error:  # a user's metric may put anything into the history
            warn(f"The checkpoint does not hold {attribute!r} of {name}. {error}")
    state: dict[str, Any] = {"known": known}
    if hasattr(callback, "get_state"):
        state["own"] = _stored(callback.get_state(), arrays, name)
    if isinstance(callback, keras.callbacks.CSVLogger):
        path = Path(callback.filename)
        state["bytes"] = path.stat().st_size if path.is_file() else 0
    return state


def _stored(value: Any, arrays: CallbackState, name: str) -> Any:
    """Returns the value as JSON can hold it; its arrays go to `arrays`.

    Raises:
        TrainingError: the value cannot be stored; the error names the callback.
    """
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _stored(part, arrays, name) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_stored(part, arrays, name) for part in value]
    if value is None or isinstance(value, str | bool | int | float):
        return value
    array = np.array(value)  # a copy: the callback may change its own
    if array.dtype == object or array.dtype.kind in "USMm":
        raise TrainingError(
            f"The state of {name} must hold numbers, strings, arrays of numbers, and lists and"
            f" dicts of them with string keys, got {shown(value)}."
        )
    if not array.shape and array.dtype.kind in "biuf":
        return array.item()
    key = str(len(arrays))
    arrays[key] = array
    return {_ARRAY: key}


def _read(state: CallbackState) -> dict[str, Any]:
    def with_array(part: dict[str, Any]) -> Any:
        return state[part[_ARRAY]] if set(part) == {_ARRAY} else part

    return json.loads(state[_JSON].tobytes(), object_hook=with_array)
