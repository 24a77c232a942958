"""What a model computes with, as names and values that can be compared across workers.

Classes, configs, variables, vocabularies, arrays and the arguments of `compile` are described.
Automatic names, seeds and weights are left out, because workers may differ in them without harm.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import warnings
import zlib
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist_ext.training import _keras_private as kp

# Keras finds objects by module and registered name. Shapes are those of the variables.
_LEFT_OUT = {"module", "registered_name", "build_config", "build_input_shape", "seed", "name"}
_COMPILED = ("optimizer", "loss", "loss_weights", "metrics", "weighted_metrics")
_NUMBER = re.compile(r"_\d+$")  # which Keras adds to automatic names


def describe_model(model: keras.Model) -> dict[str, Any]:
    """Returns name -> value; a config has one value for each of its leaves."""
    layers = kp.flat_layers(model)
    values: dict[str, Any] = {"the number of layers": len(layers)}
    for number, layer in enumerate(layers):
        _add_layer(values, f"layer {number} ({_NUMBER.sub('', layer.name)!r})", layer)
    for number, variable in enumerate(model.variables):
        if variable.shape is not None:
            kind = [str(list(variable.shape)), variable.dtype, bool(variable.trainable)]
            values[f"variable {number} ({variable.name!r})"] = kind
    if model.compiled:
        _add_compiled(values, model)
    return values


def _add_layer(values: dict[str, Any], name: str, layer: keras.Layer) -> None:
    """Adds a layer, without the layers inside it."""
    values[f"dtype of {name}"] = layer.dtype_policy.name
    if kp.is_graph_of_layers(layer):
        values[f"class of {name}"] = type(layer).__name__
    else:
        _add_object(values, name, layer)
    if callable(vocabulary := getattr(layer, "get_vocabulary", None)):
        with contextlib.suppress(TypeError, ValueError, RuntimeError):  # not adapted yet
            _add(values, f"vocabulary of {name}", np.asarray(list(map(str, vocabulary()))))
    for key, value in vars(layer).items():
        static = inspect.getattr_static(type(layer), key, None)
        # One worker may have read a cached property, and another not.
        if _is_array(value) and not isinstance(static, functools.cached_property):
            _add(values, f"{key} of {name}", np.asarray(value))


def _add_compiled(values: dict[str, Any], model: keras.Model) -> None:
    """Adds the arguments of `compile`."""
    try:
        settings = kp.compile_arguments(model)
    except (AttributeError, TypeError):  # the model has a compile() of its own
        settings = {"optimizer": getattr(model, "optimizer", None)}
    for key in _COMPILED:
        for path, leaf in keras.tree.flatten_with_path(settings.get(key)):
            name = " ".join([key, *map(str, path)])
            if hasattr(leaf, "get_config"):
                _add_object(values, name, leaf)
            else:
                _add(values, name, leaf)
    values["steps_per_execution of compile()"] = model.steps_per_execution
    values["run_eagerly of compile()"] = bool(model.run_eagerly)


def _add_object(values: dict[str, Any], name: str, thing: Any) -> None:
    """Adds the class of a Keras object, and its config."""
    values[f"class of {name}"] = type(thing).__name__
    with warnings.catch_warnings(), contextlib.suppress(Exception):  # a user's get_config
        warnings.simplefilter("ignore")  # a lambda in a config
        _add(values, name, dict(thing.get_config()))


def _add(values: dict[str, Any], name: str, value: Any) -> None:
    """Adds a value; of a config, its leaves."""
    match value:
        case {"class_name": "__lambda__"}:  # its code contains the path of the file
            pass
        case {"class_name": kind, "config": config}:  # a serialized object or function
            values[name] = kind
            _add(values, name, config)
        case dict():
            for key, part in value.items():
                # A learning rate that is no schedule is a variable, which follows the chief.
                rate = key == "learning_rate" and isinstance(part, float)
                if key not in _LEFT_OUT and not str(key).endswith("_seed") and not rate:
                    _add(values, f"{key} of {name}", part)
        case list() | tuple() if any(isinstance(part, dict | list | tuple) for part in value):
            for number, part in enumerate(value):
                _add(values, f"{name}[{number}]", part)
        case np.ndarray():
            values[name] = describe_array(value)["content"]
        case list() | tuple():
            values[name] = [_without_names(part) for part in value]
        case _:
            values[name] = _without_names(value)


def _without_names(value: Any) -> Any:
    """A value without a folder, which may differ between machines, and without Keras's numbers."""
    if not isinstance(value, str):
        return value
    return value.rpartition("/")[2] if value.startswith("/") else _NUMBER.sub("", value)


def _is_array(value: object) -> bool:
    if isinstance(value, tf.Tensor):
        return not tf.is_symbolic_tensor(value) and value.dtype not in (tf.resource, tf.variant)
    return isinstance(value, np.ndarray)


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
