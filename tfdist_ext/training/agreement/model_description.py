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


# Modules, shapes (the variables show them), seeds, whose variables follow the chief, and names.
_LEFT_OUT = {"module", "registered_name", "build_config", "build_input_shape", "seed", "name"}
# Attributes that Keras sets, and that may differ where the chief alone has saved or plotted.
_OF_KERAS = {"built", "name", "predict_function", "stop_training", "test_function"}
_OF_KERAS |= {"stop_evaluating", "stop_predicting", "train_function"}
_COMPILED = ("optimizer", "loss", "loss_weights", "metrics", "weighted_metrics")
_NUMBERED = re.compile(r"_\d+$")
_PACKAGES = ("keras.", "tensorflow.", "tfdist_ext.", "builtins")


def describe_model(model: keras.Model) -> ModelDescription:
    """Describe the layers, the variables and what was given to `compile`."""
    layers = kp.flat_layers(model)
    found = ModelDescription(layers)
    for layer in layers:
        found.add_layer(layer)
    for number, variable in enumerate(model.variables):
        if variable.shape is not None:
            kind = [str(list(variable.shape)), variable.dtype, bool(variable.trainable)]
            found.certain[f"variable {number} ({found.in_path(variable.path)})"] = kind
    if model.compiled:
        found.add_compiled(model)
    return found


class ModelDescription:
    """Name -> value; a structure is one value for each of its leaves.

    Attributes:
        certain: must be the same for the workers to train one model.
        attributes: plain values of the user's own layers, which may not matter.
    """

    def __init__(self, layers: list[keras.Layer]):
        self.certain: dict[str, Any] = {"the number of layers": len(layers)}
        self.attributes: dict[str, Any] = {}
        self._labels = _labels(layers)

    def in_path(self, path: str) -> str:
        """A path of names, each without the number that Keras has given it."""
        return "/".join(self._labels.get(p, _NUMBERED.sub("", p)) for p in path.split("/"))

    def add_layer(self, layer: keras.Layer) -> None:
        """Add a layer, without the layers inside it."""
        name = f"layer {self._labels[layer.name]!r}"
        if kp.is_graph_of_layers(layer):
            self._add_class(name, type(layer))
            operations = getattr(layer, "operations", ())
            links = [[o.name, *(before.name for before in kp.inputs_from(o))] for o in operations]
            graph = [" from ".join(map(self.in_path, link)) for link in links]
            outputs = getattr(layer, "output_names", None) or []
            self.add(f"the graph of {name}", graph)
            self.add(f"the outputs of {name}", list(map(self.in_path, outputs)))
        else:
            self._add_object(name, layer)
        self.certain[f"trainable of {name}"] = bool(layer.trainable)
        if callable(vocabulary := getattr(layer, "get_vocabulary", None)):
            with contextlib.suppress(TypeError, ValueError, RuntimeError):  # not adapted yet
                self.add(f"vocabulary of {name}", np.asarray(list(map(str, vocabulary()))))
        own = _is_own(type(layer))
        for key, value in vars(layer).items():
            of_class = inspect.getattr_static(type(layer), key, None)
            if key in _OF_KERAS or isinstance(of_class, functools.cached_property):
                continue
            if _is_array(value):
                self.add(f"{key} of {name}", np.asarray(value))
            elif inspect.isroutine(value) and of_class is None and (own or _is_own(value)):
                self.add(f"{key} of {name}", value)
            elif own and not key.startswith("_") and isinstance(value, bool | int | float | str):
                self.attributes[f"attribute {key} of {name}"] = value

    def add_compiled(self, model: keras.Model) -> None:
        """Add what was given to `compile`."""
        try:
            settings = kp.compile_arguments(model)
        except (AttributeError, TypeError):  # a compile() of its own
            settings = {"optimizer": getattr(model, "optimizer", None)}
        for key in _COMPILED:
            for path, leaf in keras.tree.flatten_with_path(settings.get(key)):
                name = " ".join([key, *map(str, path)])
                if hasattr(leaf, "get_config"):
                    self._add_object(name, leaf)
                else:
                    self.add(name, leaf)
        self.certain["steps_per_execution of compile()"] = model.steps_per_execution
        self.certain["run_eagerly of compile()"] = bool(model.run_eagerly)

    def add(self, name: str, value: Any) -> None:
        """Add a value; of a config, its leaves."""
        if isinstance(value, dict):
            self._add_config(name, value)
        elif isinstance(value, list | tuple):
            if all(isinstance(part, bool | int | float | str | None) for part in value):
                self.certain[name] = [self._plain(part) for part in value]
                return
            self.certain[name] = len(value)
            for number, part in enumerate(value):
                self.add(f"{name}[{number}]", part)
        elif inspect.isroutine(value) or isinstance(value, functools.partial):
            self.certain[name] = str(getattr(value, "__qualname__", type(value).__name__))
            self.certain[f"code of {name}"] = _code(value)
        else:
            self.certain[name] = self._plain(value)

    def _add_config(self, name: str, config: dict[str, Any]) -> None:
        if "class_name" in config and "config" in config:  # a serialized object
            kind, inner = config["class_name"], config["config"]
            if kind == "DTypePolicy":
                inner = inner["name"]
            if kind != "__lambda__" and isinstance(inner, dict):
                self.certain[name] = kind
            config = inner
        if not isinstance(config, dict):  # the name of a function or dtype
            self.add(name, config)
            return
        if {"closure", "defaults"} <= config.keys() or isinstance(config.get("value"), tuple):
            return  # a lambda: its bytes name the file. Its code is that of an attribute.
        for key, value in config.items():
            # A rate that is no schedule is a variable, which follows the chief.
            rate = key == "learning_rate" and isinstance(value, float)
            if key not in _LEFT_OUT and not str(key).endswith("_seed") and not rate:
                self.add(f"{key} of {name}", value)

    def _add_object(self, name: str, thing: Any) -> None:
        """The class of a Keras object, its config, and its code where it is the user's own."""
        self._add_class(name, type(thing))
        with warnings.catch_warnings(), contextlib.suppress(Exception):  # user's code
            warnings.simplefilter("ignore")  # of lambdas in it
            self._add_config(name, dict(thing.get_config()))

    def _add_class(self, name: str, kind: type) -> None:
        """The methods. Other entries of a class come and go: Keras's saving adds annotations."""
        self.certain[f"class of {name}"] = kind.__name__
        for base in filter(_is_own, kind.__mro__):
            codes = ((key, _code(value)) for key, value in vars(base).items())
            if methods := sorted((key, code) for key, code in codes if code):
                self.certain[f"code of {base.__name__}, class of {name}"] = _digest(repr(methods))

    def _plain(self, value: Any) -> Any:
        if isinstance(value, str):
            if value.startswith("/"):  # the same file may lie elsewhere on another machine
                return value.rpartition("/")[2]
            return self._labels.get(value, value)
        if value is None or isinstance(value, bool | int | float):
            return value
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, np.ndarray):
            return describe_array(value)["content"]
        return type(value).__name__


def _labels(layers: Iterable[keras.Layer]) -> dict[str, str]:
    """Name -> the name in a process that makes this model alone."""
    labels: dict[str, str] = {}
    seen: Counter[str] = Counter()
    for layer in layers:
        for part in (layer, *getattr(layer, "operations", ())):
            if part.name not in labels:
                base = _NUMBERED.sub("", part.name)
                labels[part.name] = f"{base}_{seen[base]}" if seen[base] else base
                seen[base] += 1
    return labels


def _is_array(value: object) -> bool:
    if isinstance(value, tf.Tensor):
        return not tf.is_symbolic_tensor(value) and value.dtype not in (tf.resource, tf.variant)
    return isinstance(value, np.ndarray)


def _code(function: Any) -> str:
    """A digest of the user's own Python code behind a method, partial and the like, or ""."""
    if isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, property):
        function = function.fget
    function = getattr(function, "python_function", function)
    function = inspect.unwrap(getattr(function, "__func__", function))
    if not isinstance(function, types.FunctionType) or not _is_own(function):
        return ""
    return _digest(repr(_of_code(function.__code__)))


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
    content: dict[str, Any] = {}
    if array.dtype.kind == "f" or array.dtype.name == "bfloat16":
        floats = values.astype(np.float64)
        content["first"] = floats[:_FEW].round(5).tolist()
        numbers = np.nan_to_num(floats, nan=12345.678).clip(-1e30, 1e30)
        weighted = numbers * (1 + np.arange(numbers.size) % 97 / 97)  # an order counts, too
        starts = np.arange(0, max(numbers.size, 1), max(1, -(-numbers.size // _RUNS)))
        if numbers.size:
            content["sums"] = np.add.reduceat(weighted, starts).tolist()
            content["sizes"] = np.add.reduceat(np.abs(weighted), starts).tolist()
    elif is_text:
        texts = [value if isinstance(value, bytes) else str(value).encode() for value in values]
        content["first"] = [text[:40].decode(errors="replace") for text in texts[:_FEW]]
        content["checksum"] = zlib.crc32(b"\0".join(texts))
    else:
        content["first"] = values[:_FEW].tolist()
        content["checksum"] = zlib.crc32(np.ascontiguousarray(values).tobytes())
    dtype = "string" if is_text else array.dtype.name
    return {"shape": list(array.shape), "dtype": dtype, "content": content}


def _sample(flat: np.ndarray) -> np.ndarray:
    if flat.size <= _RUNS * _RUN:
        return flat
    starts = np.linspace(0, flat.size - _RUN, _RUNS).astype(np.int64)
    return np.concatenate([flat[start : start + _RUN] for start in starts])
