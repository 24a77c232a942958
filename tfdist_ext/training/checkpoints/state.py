"""What belongs to the state of a training, and names for it that hold in every job.

Of the model and its optimizers that is all their variables. Keras numbers names by what the process
has made before: a layer is `dense` in one job and `dense_3` in the next. Here the numbers count
within the model.

Of Keras's callbacks it is what begins anew in each `fit`: how long EarlyStopping has waited, the
best loss so far, the history. A callback of the user's says what it knows by `get_state()`, and
gets it back by `set_state(state)` after its `on_train_begin`: numbers, texts, NumPy arrays, and
lists and dicts of them.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np

from tfdist_ext.errors import TrainingError
from tfdist_ext.training import _keras_private as kp
from tfdist_ext.training.checkpoints.atomic_write import AnyPath
from tfdist_ext.training.checkpoints.file import CheckpointFile, Saved
from tfdist_ext.training.variables import optimizers_of
from tfdist_ext.user_frames import warn

__all__ = [
    "MODEL",
    "CallbackState",
    "callback_state",
    "continue_log_files",
    "kinds_of",
    "matching",
    "restore_callbacks",
    "state_of",
]


MODEL, METRICS = "model", "metrics"


_NUMBERED = re.compile(r"(.*?)(?:_(\d+))?$", re.S)


_SHOWN = 6


def state_of(model: keras.Model) -> dict[str, dict[str, keras.Variable]]:
    """Group -> name -> Keras variable: the model's, the metrics', and those of each optimizer.

    The model's are weights, moving statistics, counters and the states of seed generators; an
    optimizer's are its slots, its counter of steps, a learning rate that is no schedule, and a
    loss scale.
    """
    metrics = [variable for metric in model.metrics for variable in metric.variables]
    known = {id(variable) for variable in metrics}
    own = _named((path, v) for path, v in _paths_in(model) if _has_value(v) and id(v) not in known)
    state = {MODEL: own, METRICS: _named((v.path, v) for v in metrics if _has_value(v))}
    for name, optimizer in _optimizers(model).items():
        state[name] = _named_in_optimizer(filter(_has_value, optimizer.variables), own)
    return state


def kinds_of(model: keras.Model) -> dict[str, str]:
    """Group -> class, of what cannot be restored into another class: the optimizers."""
    return {name: _class_of(optimizer) for name, optimizer in _optimizers(model).items()}


def matching(
    file: CheckpointFile, model: keras.Model, path: AnyPath
) -> list[tuple[Saved, keras.Variable]]:
    """(saved variable, the model's variable) of all that is to be restored.

    A model that is not compiled takes no optimizer's state; metrics take what there is of theirs.

    Raises:
        TrainingError: another model, or another optimizer.
    """
    state = state_of(model)
    pairs = _pairs(
        file.variables(MODEL),
        state[MODEL],
        f"{path} must be a checkpoint of this model, got one of another model",
    )
    for name, kind in kinds_of(model).items():
        saved_kind = file.kind(name)
        if saved_kind is None:
            continue  # the model that was saved was not compiled: there is nothing to restore
        if saved_kind != kind:
            raise TrainingError(
                f"{path} must have the state of {kind}, the optimizer of the model, got that of"
                f" {saved_kind}: compile with {saved_kind}; or restore the weights alone, before"
                " compile()."
            )
        pairs += _pairs(
            file.variables(name),
            state[name],
            f"{path} must have the state of this {kind}, got that of one with other slots, or set"
            " up differently",
        )
    metrics = file.variables(METRICS)
    for name, variable in state[METRICS].items():
        saved = metrics.get(name)
        if saved is not None and saved.shape == tuple(variable.shape):
            pairs.append((saved, variable))
    return pairs


def _paths_in(layer: keras.Layer, parent: str = "") -> Iterator[tuple[str, keras.Variable]]:
    """(path, variable) by where a variable is in the model.

    The variable's own path says where its layer was built, which is another place in a copy.
    """
    inner = kp.inner_layers(layer)
    of_inner = {id(variable) for part in inner for variable in part.variables}
    for variable in layer.variables:
        if id(variable) not in of_inner:
            yield parent + variable.name, variable
    for part in inner:
        yield from _paths_in(part, f"{parent}{part.name}/")


def _named(paths: Iterable[tuple[str, keras.Variable]]) -> dict[str, keras.Variable]:
    """Name -> variable; two of one path are told apart by their order."""
    variables = {id(variable): (path, variable) for path, variable in reversed(list(paths))}
    pairs = list(reversed(variables.values()))  # a shared layer counts where it comes first
    renamed = _renamed([path for path, _ in pairs])
    return _told_apart((renamed[path], variable) for path, variable in pairs)


def _renamed(paths: list[str]) -> dict[str, str]:
    """Path -> the same with `dense_7` and `dense_9` called `dense` and `dense_1`, at each level."""
    numbers: dict[tuple[str, str], set[int]] = {}  # (parent, word) -> numbers in use
    for path in paths:
        for parent, word, number in _levels(path):
            numbers.setdefault((parent, word), set()).add(number)

    def rename(path: str) -> str:
        parts = []
        for parent, word, number in _levels(path):
            place = sorted(numbers[parent, word]).index(number)
            parts.append(f"{word}_{place}" if place else word)
        return "/".join(parts)

    return {path: rename(path) for path in paths}


def _levels(path: str) -> Iterable[tuple[str, str, int]]:
    parent = ""
    for part in path.split("/"):
        match = _NUMBERED.match(part)
        assert match is not None  # it matches anything
        yield parent, match[1], int(match[2] or 0)
        parent += part + "/"


def _named_in_optimizer(
    variables: Iterable[keras.Variable], own: Mapping[str, keras.Variable]
) -> dict[str, keras.Variable]:
    """Name -> variable; an optimizer names its variables by the paths of those that it trains."""
    trained = {v.path.replace("/", "_"): name.replace("/", "_") for name, v in own.items()}
    longest_first = sorted(trained, key=len, reverse=True)

    def name_of(variable: keras.Variable) -> str:
        name = variable.path.rsplit("/", 1)[-1]
        path = next((path for path in longest_first if name.startswith(f"{path}_")), None)
        return name if path is None else trained[path] + name.removeprefix(path)

    return _told_apart((name_of(variable), variable) for variable in variables)


def _told_apart(named: Iterable[tuple[str, keras.Variable]]) -> dict[str, keras.Variable]:
    seen: Counter[str] = Counter()
    result = {}
    for name, variable in named:
        result[f"{name}#{seen[name]}" if seen[name] else name] = variable
        seen[name] += 1
    return result


def _optimizers(model: keras.Model) -> dict[str, keras.optimizers.Optimizer]:
    """Attribute -> optimizer; a model with a step of its own may have several."""
    return {
        name.replace("/", "_"): optimizer  # the name of a group in an HDF5 file
        for name, optimizer in optimizers_of(model).items()
        if optimizer.built
    }


def _class_of(optimizer: keras.optimizers.Optimizer) -> str:
    inner = getattr(optimizer, "inner_optimizer", None)
    name = type(optimizer).__name__
    return name if inner is None else f"{name} of {type(inner).__name__}"


def _has_value(variable: keras.Variable) -> bool:
    return kp.raw_value(variable) is not None


def _pairs(
    saved: Mapping[str, Saved], here: Mapping[str, keras.Variable], what: str
) -> list[tuple[Saved, keras.Variable]]:
    missing = [variable.path for name, variable in here.items() if name not in saved]
    extra = [variable.path for name, variable in saved.items() if name not in here]
    pairs = [(saved[name], variable) for name, variable in here.items() if name in saved]
    other = [
        f"{new.path} (saved: {old.dtype} {old.shape}, here: {new.dtype} {tuple(new.shape)})"
        for old, new in pairs
        if old.shape != tuple(new.shape) or old.dtype != new.dtype
    ]
    found = {
        "the checkpoint lacks": missing,
        "only the checkpoint has": extra,
        "of another shape or dtype:": other,
    }
    differences = [f"{words} {_list(paths)}" for words, paths in found.items() if paths]
    if differences:
        raise TrainingError(f"{what}: {'; '.join(differences)}.")
    return pairs


def _list(paths: list[str]) -> str:
    more = f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else ""
    return ", ".join(paths[:_SHOWN]) + more


CallbackState = dict[str, np.ndarray]  # "state": JSON as bytes; the arrays in it by their numbers

_JSON = "state"
_ARRAY = "array of the state"  # the key of {_ARRAY: "3"} in the JSON


Callbacks = Iterable[keras.callbacks.Callback]


def callback_state(callbacks: Callbacks, *, stopped: bool) -> CallbackState:
    """What these callbacks know.

    Args:
        stopped: one of them has told the training to stop.

    Raises:
        TrainingError: what a `get_state` gives is nothing that can be stored.
    """
    arrays: CallbackState = {}
    states = {}
    for name, callback in _named_callbacks(callbacks):
        if state := _state_of(callback, name, arrays):
            states[name] = state
    text = json.dumps({"stopped": stopped, "callbacks": states})
    return {_JSON: np.frombuffer(text.encode(), np.uint8), **arrays}


def restore_callbacks(state: CallbackState, callbacks: Callbacks) -> bool:
    """Give callbacks what they knew, after their `on_train_begin`; whether one had told to stop.

    A callback that was not there when the state was saved begins anew.
    """
    saved = _read(state)
    for name, callback in _named_callbacks(callbacks):
        if name in saved["callbacks"]:
            _give(callback, _with_arrays(saved["callbacks"][name], state))
    return bool(saved["stopped"])


def continue_log_files(state: CallbackState, callbacks: Callbacks) -> None:
    """Before `on_train_begin`: let each CSVLogger write on after the last row of the checkpoint."""
    saved = _read(state)["callbacks"]
    for name, callback in _named_callbacks(callbacks):
        if isinstance(callback, keras.callbacks.CSVLogger) and name in saved:
            callback.append = True
            path = Path(callback.filename)
            if path.is_file() and path.stat().st_size > saved[name]["bytes"]:
                with path.open("r+b") as file:
                    file.truncate(saved[name]["bytes"])


# By what two callbacks of one class are told apart, and recognized in another job.
_SETTINGS = ("monitor", "filepath", "filename", "log_dir")


def _named_callbacks(callbacks: Callbacks) -> Iterator[tuple[str, keras.callbacks.Callback]]:
    """(class and settings, with #1 for the second one of them; callback)."""
    seen: Counter[str] = Counter()
    for callback in callbacks:
        settings = [Path(str(getattr(callback, each, ""))).name for each in _SETTINGS]
        name = " ".join([type(callback).__qualname__, *filter(None, settings)])
        yield (f"{name}#{seen[name]}" if seen[name] else name), callback
        seen[name] += 1


def _state_of(callback: keras.callbacks.Callback, name: str, arrays: CallbackState) -> Any:
    """What is stored of a callback: what the user gives, and what Keras's own classes know."""
    state: dict[str, Any] = {}
    if hasattr(callback, "get_state"):
        where = f"get_state() of {name}"
        state["own"] = _without_arrays(callback.get_state(), arrays, where)
    known = {each: getattr(callback, each, None) for each in kp.remembered_by(callback)}
    if known:
        state["known"] = _without_arrays(known, arrays, name, strict=False)
    if isinstance(callback, keras.callbacks.CSVLogger):
        if callback.csv_file is not None and not callback.csv_file.closed:
            callback.csv_file.flush()
        path = Path(callback.filename)
        state["bytes"] = path.stat().st_size if path.is_file() else 0
    return state


def _give(callback: keras.callbacks.Callback, state: Mapping[str, Any]) -> None:
    for name, value in state.get("known", {}).items():
        if name in kp.remembered_by(callback):
            setattr(callback, name, value)
    if "own" in state and hasattr(callback, "set_state"):
        callback.set_state(state["own"])


def _without_arrays(value: Any, arrays: CallbackState, where: str, *, strict: bool = True) -> Any:
    """The value as JSON has it, its arrays put into `arrays`.

    Args:
        strict: what cannot be stored is an error; else it is left out of its dict, with a warning.
    """
    if isinstance(value, Mapping):
        stored = {}
        for key, each in value.items():
            try:
                if not isinstance(key, str):
                    raise _cannot_be_stored(where, f"the key {key!r}")
                stored[key] = _without_arrays(each, arrays, where, strict=strict)
            except TrainingError:
                if strict:
                    raise
                warn(
                    f"{key!r} of {where} is not in the checkpoint: it holds a"
                    f" {type(each).__name__}, and can hold numbers, texts, arrays, lists and dicts."
                    " A training that is resumed begins without it."
                )
        return stored
    if isinstance(value, list | tuple):
        return [_without_arrays(each, arrays, where) for each in value]
    if value is None or isinstance(value, str | bool | int | float):
        return value
    array = np.asarray(value)
    if array.dtype == object or array.dtype.kind in "USMm":
        raise _cannot_be_stored(where, f"a {type(value).__name__}")
    if not array.shape and array.dtype.kind in "biuf":
        return array.item()
    key = str(len(arrays))
    arrays[key] = array
    return {_ARRAY: key}


def _cannot_be_stored(where: str, what: str) -> TrainingError:
    return TrainingError(
        f"{where} must be numbers, texts, arrays of numbers, and lists and dicts of them by texts,"
        f" got {what}: leave it out, or give what it can be made of again."
    )


def _with_arrays(value: Any, arrays: CallbackState) -> Any:
    if isinstance(value, dict):
        if set(value) == {_ARRAY}:
            return arrays[value[_ARRAY]]
        return {key: _with_arrays(each, arrays) for key, each in value.items()}
    if isinstance(value, list):
        return [_with_arrays(each, arrays) for each in value]
    return value


def _read(state: CallbackState) -> dict[str, Any]:
    if _JSON not in state:  # of an older version
        return {"stopped": False, "callbacks": {}}
    read: dict[str, Any] = json.loads(state[_JSON].tobytes())
    return read
