"""What a model computes with, as names and values that can be compared across workers."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import re
import types
import warnings
import zlib
from collections import Counter
from collections.abc import Iterable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist_ext.training import _keras_private as kp

__all__ = ["ModelDescription", "describe_array", "describe_model"]


# Modules, shapes (the variables show them), and seeds, whose variables follow the chief.
_LEFT_OUT = {"module", "registered_name", "build_config", "build_input_shape", "seed", "name"}
# Attributes that Keras sets on each layer or model.
_OF_KERAS = {
    "predict_function",
    "test_function",
    "train_function",
    "autocast",
    "built",
    "compiled",
    "name",
    "steps_per_execution",
    "stop_evaluating",
    "stop_predicting",
    "stop_training",
    "supports_jit",
    "supports_masking",
    "trainable",
    "unrolled_steps_per_execution",
}
# What is compiled as an object, and has a config.
_COMPILED = (keras.losses.Loss, keras.metrics.Metric, keras.optimizers.Optimizer)
_NUMBERED = re.compile(r"_\d+$")
_PACKAGES = ("keras.", "tensorflow.", "tfdist_ext.", "builtins")


def describe_model(model: keras.Model, *, with_code: bool) -> ModelDescription:
    """
    Args:
        with_code: also the bytecode of functions, methods and classes outside of Keras.
    """
    layers = kp.flat_layers(model)
    names = _Names(layers)
    found = ModelDescription(names, with_code)
    found.add("the number of layers", len(layers))
    for layer in layers:
        _describe_layer(layer, names, found)
    for number, variable in enumerate(model.variables):
        if variable.shape is not None:
            found.add(
                f"variable {number} ({names.of_path(variable.path)})",
                [str(list(variable.shape)), variable.dtype, bool(variable.trainable)],
            )
    if model.compiled:
        _describe_compiled(model, found)
    return found


class _Names:
    """Names as a process gives them that makes this model alone."""

    def __init__(self, layers: Iterable[keras.Layer]):
        self._names: dict[str, str] = {}
        seen: Counter[str] = Counter()
        for layer in layers:
            for part in (layer, *getattr(layer, "operations", ())):
                if part.name not in self._names:
                    base = _NUMBERED.sub("", part.name)
                    self._names[part.name] = f"{base}_{seen[base]}" if seen[base] else base
                    seen[base] += 1

    def __getitem__(self, name: str) -> str:
        return self._names.get(name, name)

    def of_path(self, path: str) -> str:
        return "/".join(self._names.get(p, _NUMBERED.sub("", p)) for p in path.split("/"))


class ModelDescription:
    """Name -> value; a structure is one value for each of its leaves.

    Attributes:
        certain: must be the same for the workers to train one model.
        attributes: plain values of the user's own layers, which may not matter.
    """

    def __init__(self, names: _Names, with_code: bool):
        self.certain: dict[str, Any] = {}
        self.attributes: dict[str, Any] = {}
        self._names = names
        self._with_code = with_code

    def add(self, name: str, value: Any) -> None:
        if isinstance(value, dict):
            if "class_name" in value and "config" in value:  # a serialized object
                self.certain[name] = value["class_name"]
                value = value["config"]
                if not isinstance(value, dict):  # of a function, its name
                    self.certain[name] = self._plain(value)
                    return
                if self.certain[name] == "__lambda__":
                    return  # bytes, which name the file; `add_function` has its code
                if self.certain[name] == "DTypePolicy":
                    self.certain[name] = value.get("name")
            if {"closure", "defaults"} <= value.keys() or value.keys() == {"value"}:
                return  # the same in a Lambda layer, or for an activation
            self._add_settings(name, value)
        elif isinstance(value, list | tuple):
            plain = [self._plain(part) for part in value]
            if all(isinstance(part, bool | int | float | str | None) for part in value):
                self.certain[name] = plain
                return
            self.certain[name] = len(value)
            for number, part in enumerate(value):
                self.add(f"{name}[{number}]", part)
        elif inspect.isroutine(value) or isinstance(value, functools.partial):
            self.add_function(name, value)
        else:
            self.certain[name] = self._plain(value)

    def add_config(self, name: str, thing: Any) -> None:
        """The class of a Keras object, its config, and its code where it is the user's own."""
        self.certain[f"class of {name}"] = type(thing).__name__
        self.add_code_of_class(name, type(thing))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of lambdas in it
                config = dict(thing.get_config())
        except Exception:  # user's code: without a config only variables and code are compared
            config = {}
        self._add_settings(name, config)

    def _add_settings(self, name: str, settings: dict[str, Any]) -> None:
        for key, value in settings.items():
            # A rate that is no schedule is a variable, which follows the chief.
            rate = key == "learning_rate" and isinstance(value, float)
            if key not in _LEFT_OUT and not str(key).endswith("_seed") and not rate:
                self.add(f"{key} of {name}", value)

    def add_function(self, name: str, function: object) -> None:
        self.certain[name] = _name_of(function)
        self.certain[f"code of {name}"] = self._code(function)

    def add_code_of_class(self, name: str, kind: type) -> None:
        """The methods. Other entries of a class come and go: Keras's saving adds annotations."""
        for base in filter(_is_own, kind.__mro__):
            codes = ((key, self._code(value)) for key, value in vars(base).items())
            if methods := sorted((key, code) for key, code in codes if code):
                self.certain[f"code of {base.__name__}, class of {name}"] = _digest(repr(methods))

    def _code(self, function: object) -> str:
        """A digest of a Python function's code; "" for anything else, or where it is left out."""
        python = _python_function(function)
        if python is None or not self._with_code:
            return ""
        return _digest(repr(_of_code(python.__code__)))

    def _plain(self, value: Any) -> Any:
        if isinstance(value, str):
            # The same file may lie elsewhere on another machine.
            return value.rpartition("/")[2] if value.startswith("/") else self._names[value]
        if value is None or isinstance(value, bool | int | float):
            return value
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, np.ndarray):
            return describe_array(value)["content"]
        return type(value).__name__


def _describe_layer(layer: keras.Layer, names: _Names, found: ModelDescription) -> None:
    name = f"layer {names[layer.name]!r}"
    if kp.is_graph_of_layers(layer):  # its layers speak for themselves
        found.certain[f"class of {name}"] = type(layer).__name__
        found.add_code_of_class(name, type(layer))
        operations = getattr(layer, "operations", ())
        links = [[o.name, *(before.name for before in kp.inputs_from(o))] for o in operations]
        graph = [" from ".join(map(names.of_path, link)) for link in links]
        found.add(f"the graph of {name}", graph)
        outputs = getattr(layer, "output_names", None) or []
        found.add(f"the outputs of {name}", list(map(names.of_path, outputs)))
    else:
        found.add_config(name, layer)
    found.certain[f"trainable of {name}"] = bool(layer.trainable)
    if callable(vocabulary := getattr(layer, "get_vocabulary", None)):
        with contextlib.suppress(TypeError, ValueError, RuntimeError):  # not adapted yet
            words = np.asarray([str(word) for word in vocabulary()])
            found.certain[f"vocabulary of {name}"] = describe_array(words)["content"]
    own = _is_own(type(layer))
    for key, value in vars(layer).items():
        of_class = inspect.getattr_static(type(layer), key, None)
        if key in _OF_KERAS or isinstance(of_class, functools.cached_property):
            continue
        if _is_array(value):
            found.add(f"{key} of {name}", np.asarray(value))
        elif callable(value) and inspect.isroutine(value) and of_class is None:
            if own or _is_own(value):
                found.add_function(f"{key} of {name}", value)
        elif own and not key.startswith("_") and isinstance(value, bool | int | float | str):
            found.attributes[f"attribute {key} of {name}"] = value


def _is_array(value: object) -> bool:
    if isinstance(value, tf.Tensor):
        return not tf.is_symbolic_tensor(value) and value.dtype not in (tf.resource, tf.variant)
    return isinstance(value, np.ndarray)


def _describe_compiled(model: keras.Model, found: ModelDescription) -> None:
    try:
        settings = kp.compile_arguments(model)
    except (AttributeError, TypeError):  # a compile() of its own
        settings = {"optimizer": getattr(model, "optimizer", None)}
    for key in ("optimizer", "loss", "loss_weights", "metrics", "weighted_metrics"):
        for path, leaf in keras.tree.flatten_with_path(settings.get(key)):
            name = " ".join([key, *map(str, path)])
            if isinstance(leaf, _COMPILED):
                found.add_config(name, leaf)
            else:
                found.add(name, leaf)
    found.certain["steps_per_execution of compile()"] = model.steps_per_execution
    found.certain["run_eagerly of compile()"] = bool(model.run_eagerly)


def _python_function(function: Any) -> types.FunctionType | None:
    """The user's own Python function behind a method, property, partial or tf.function."""
    if isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, property):
        function = function.fget
    function = getattr(function, "python_function", function)
    function = inspect.unwrap(getattr(function, "__func__", function))
    return function if isinstance(function, types.FunctionType) and _is_own(function) else None


def _name_of(function: object) -> str:
    return str(getattr(function, "__qualname__", type(function).__name__))


def _of_code(code: types.CodeType) -> Any:
    constants = [
        _of_code(value) if isinstance(value, types.CodeType) else repr(value)
        for value in code.co_consts
        if not isinstance(value, frozenset)  # whose order is not the same in each process
    ]
    return code.co_code, code.co_names, constants


def _is_own(thing: object) -> bool:
    """Whether a class or function is the user's own, not one of the packages'."""
    return not str(getattr(thing, "__module__", "builtins")).startswith(_PACKAGES)


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


_RUNS, _RUN = 64, 1 << 12  # of an array with more elements, runs at even distances are taken
_FEW = 4


def describe_array(array: tf.Tensor | np.ndarray) -> dict[str, Any]:
    """Shape, dtype and content as values that `check_equal_across_workers` compares.

    Content is a checksum, and of floats weighted sums, because another processor may round
    differently. Of more than 2**18 elements it is of a sample.
    """
    array = np.asarray(array)
    is_text = array.dtype.kind in "OSU"
    values = _sample(array.reshape(-1))
    content: dict[str, Any] = {"first": [_plain(value) for value in values[:_FEW]]}
    if array.dtype.kind == "f" or array.dtype.name == "bfloat16":
        numbers = np.nan_to_num(values.astype(np.float64), nan=12345.678).clip(-1e30, 1e30)
        weighted = numbers * (1 + np.arange(numbers.size) % 97 / 97)  # an order counts, too
        starts = np.arange(0, max(numbers.size, 1), max(1, -(-numbers.size // _RUNS)))
        if numbers.size:
            content["sums"] = np.add.reduceat(weighted, starts).tolist()
            content["sizes"] = np.add.reduceat(np.abs(weighted), starts).tolist()
    elif is_text:
        texts = (value if isinstance(value, bytes) else str(value).encode() for value in values)
        content["checksum"] = zlib.crc32(b"\0".join(texts))
    else:
        content["checksum"] = zlib.crc32(np.ascontiguousarray(values).tobytes())
    dtype = "string" if is_text else array.dtype.name
    return {"shape": list(array.shape), "dtype": dtype, "content": content}


def _sample(flat: np.ndarray) -> np.ndarray:
    if flat.size <= _RUNS * _RUN:
        return flat
    starts = np.linspace(0, flat.size - _RUN, _RUNS).astype(np.int64)
    return np.concatenate([flat[start : start + _RUN] for start in starts])


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        value = value[:40].decode(errors="replace")
    if isinstance(value, str):
        return value[:40]
    if isinstance(value, int | np.integer | np.bool_):
        return int(value)
    try:
        return round(float(value), 5)
    except (TypeError, ValueError):
        return str(value)[:40]
