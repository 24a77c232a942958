"""What a model computes with, as names and values that can be compared across workers.

Configs, code, variables, arrays, vocabularies and what was given to `compile` are described. What
may differ without harm is left out: automatic names, seeds and weights.
"""

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

# Modules, shapes (the variables show them), seeds, whose variables follow the chief, and names.
_LEFT_OUT = {"module", "registered_name", "build_config", "build_input_shape", "seed", "name"}
# Attributes that Keras sets, and that may differ where the chief alone has predicted.
_OF_KERAS = {"predict_function", "test_function", "train_function"}
_COMPILED = ("optimizer", "loss", "loss_weights", "metrics", "weighted_metrics")
_NUMBERED = re.compile(r"_\d+$")
_PACKAGES = ("keras.", "tensorflow.", "tfdist_ext.", "builtins")


def describe_model(model: keras.Model) -> dict[str, Any]:
    """Returns name -> value; a config is one value for each of its leaves."""
    layers = kp.flat_layers(model)
    found = _Description(layers)
    for layer in layers:
        found.add_layer(layer)
    for number, variable in enumerate(model.variables):
        if variable.shape is not None:
            kind = [str(list(variable.shape)), variable.dtype, bool(variable.trainable)]
            found.values[f"variable {number} ({found.in_path(variable.path)})"] = kind
    if model.compiled:
        found.add_compiled(model)
    return found.values


class _Description:
    def __init__(self, layers: list[keras.Layer]):
        self.values: dict[str, Any] = {"the number of layers": len(layers)}
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
            self.values[f"the graph of {name}"] = graph
            self.values[f"the outputs of {name}"] = list(map(self.in_path, outputs))
        else:
            self._add_object(name, layer)
        if callable(vocabulary := getattr(layer, "get_vocabulary", None)):
            with contextlib.suppress(TypeError, ValueError, RuntimeError):  # not adapted yet
                self._add(f"vocabulary of {name}", np.asarray(list(map(str, vocabulary()))))
        own = _is_own(type(layer))
        for key, value in vars(layer).items():
            of_class = inspect.getattr_static(type(layer), key, None)
            if key in _OF_KERAS or isinstance(of_class, functools.cached_property):
                continue
            if _is_array(value):
                self._add(f"{key} of {name}", np.asarray(value))
            elif inspect.isroutine(value) and of_class is None and (own or _is_own(value)):
                self._add(f"{key} of {name}", value)

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
                    self._add(name, leaf)
        self.values["steps_per_execution of compile()"] = model.steps_per_execution
        self.values["run_eagerly of compile()"] = bool(model.run_eagerly)

    def _add_object(self, name: str, thing: Any) -> None:
        """The class of a Keras object, and its config."""
        self._add_class(name, type(thing))
        with warnings.catch_warnings(), contextlib.suppress(Exception):  # user's code
            warnings.simplefilter("ignore")  # of lambdas in it
            self._add(name, dict(thing.get_config()))

    def _add_class(self, name: str, kind: type) -> None:
        """The methods. Other entries of a class come and go: Keras's saving adds annotations."""
        self.values[f"class of {name}"] = kind.__name__
        for base in filter(_is_own, kind.__mro__):
            codes = ((key, _code(value)) for key, value in vars(base).items())
            if methods := sorted((key, code) for key, code in codes if code):
                self.values[f"code of {base.__name__}, class of {name}"] = _digest(repr(methods))

    def _add(self, name: str, value: Any) -> None:
        """Add a value; of a config, its leaves."""
        match value:
            # A lambda: its bytes name the file. Its code is that of an attribute.
            case {"class_name": "__lambda__"} | {"closure": _, "defaults": _}:
                pass
            case {"class_name": "DTypePolicy", "config": {"name": dtype}}:
                self.values[name] = dtype
            case {"class_name": kind, "config": config}:  # a serialized object or function
                if isinstance(config, dict):
                    self.values[name] = kind
                self._add(name, config)
            case dict():
                for key, part in value.items():
                    # A rate that is no schedule is a variable, which follows the chief.
                    rate = key == "learning_rate" and isinstance(part, float)
                    if key not in _LEFT_OUT and not str(key).endswith("_seed") and not rate:
                        self._add(f"{key} of {name}", part)
            case list() | tuple():
                if all(isinstance(part, bool | int | float | str | None) for part in value):
                    self.values[name] = [self._plain(part) for part in value]
                    return
                self.values[name] = len(value)
                for number, part in enumerate(value):
                    self._add(f"{name}[{number}]", part)
            case _ if inspect.isroutine(value) or isinstance(value, functools.partial):
                self.values[name] = str(getattr(value, "__qualname__", type(value).__name__))
                self.values[f"code of {name}"] = _code(value)
            case _:
                self.values[name] = self._plain(value)

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


_SAMPLE, _FEW = 1 << 18, 4


def describe_array(array: tf.Tensor | np.ndarray) -> dict[str, Any]:
    """Shape, dtype and content as values that `check_equal_across_workers` compares.

    Content is a checksum, and of floats weighted sums, because another processor may round
    differently. Of large arrays it is of a sample. "first" is for messages only.
    """
    array = np.asarray(array)
    flat = array.reshape(-1)
    flat = flat[:: flat.size // _SAMPLE | 1]  # odd: not one channel alone
    is_text = array.dtype.kind in "OSU"
    content: dict[str, Any] = {"first": flat[:_FEW].tolist()}
    if array.dtype.kind == "f" or array.dtype.name == "bfloat16":
        floats = flat.astype(np.float64)
        content["first"] = floats[:_FEW].round(5).tolist()
        numbers = np.nan_to_num(floats, nan=12345.678).clip(-1e30, 1e30)
        weights = 3 + np.arange(numbers.size) % 97 / 97  # an order counts, too
        size = np.abs(numbers).sum()
        # Not small beside the size, from which the noise comes.
        content["sums"] = [float(size), float(5 * size + (weights * numbers).sum())]
    elif is_text:
        texts = [value if isinstance(value, bytes) else str(value).encode() for value in flat]
        content["first"] = [text[:40].decode(errors="replace") for text in texts[:_FEW]]
        content["checksum"] = zlib.crc32(b"\0".join(texts))
    else:
        content["checksum"] = zlib.crc32(np.ascontiguousarray(flat).tobytes())
    dtype = "string" if is_text else array.dtype.name
    return {"shape": list(array.shape), "dtype": dtype, "content": content}
