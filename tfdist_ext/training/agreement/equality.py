"""Calls, data and models that must be equal on all workers: an error before the first step.

Each worker takes its part of what it believes to be the global batch. If calls differ, workers wait
for each other forever. If data differs, as after a shuffle without a seed or where each worker
loads a part, some examples are used twice and others never, and nothing fails.

What is compared is a flat dict from names to texts. Workers exchange a hash of the dict. Only if
the hashes differ, the workers exchange the texts.

Of a model, classes, configs, variables, vocabularies and the arguments of `compile` are compared.
Automatic names, seeds and weights may differ without harm.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist_ext.data.pipelines import Structure, named_parts
from tfdist_ext.errors import TrainingError
from tfdist_ext.training._keras_private import compile_arguments, flat_layers, is_graph_of_layers
from tfdist_ext.training.agreement.task_status import Reduction
from tfdist_ext.user_frames import warn

_SHOWN, _MOST = 200, 3  # characters of a text, differences
_FLOATS = re.compile(r"^(b?float\S+ \[[\d, ]*\]) .*")  # text of an array; its kind
# Of a config. Keras finds objects by module and registered name. Shapes are those of the variables.
# The code of a lambda contains the path of its file.
_LEFT_OUT = {"module", "registered_name", "build_config", "build_input_shape", "seed", "name"}
_LEFT_OUT |= {"code", "defaults", "closure"}
LOSS_AND_METRICS = ("loss", "loss_weights", "metrics", "weighted_metrics")
_NUMBER = re.compile(r"_\d+$")  # which Keras adds to automatic names
_SAMPLE, _FEW = 1 << 18, 4  # elements of an array that are compared; that a text shows
SAME_ARGUMENTS = (
    "Pass the same data and arguments on every worker, as for one device. Each worker takes its"
    " part of every global batch."
)
SAME_DATA = (
    "Each worker takes its own part of the same global batches, so some examples would be used"
    " twice and others never. Give every worker the same data, batch size and order (a seed for"
    " shuffle(), or the same keras.utils.set_random_seed() on every worker before the data is"
    " made); or let each worker read its own examples with tfd.data.from_dataset_fn()."
)
SAME_MODEL = (
    "All workers train one model together. Build and compile the same model on every worker, from"
    " the same code and settings."
)


def check_equal_across_workers(
    reduction: Reduction, values: Mapping[str, Any], advice: str
) -> None:
    """Compares values by name; every worker must call.

    Arguments are compared if they decide how many steps a call has, or what the steps do: of data
    only the kind, of a path only whether there is one. Arrays of floats may differ with a warning,
    because another processor may round them differently.

    Args:
        values: name -> value; see `as_text`.
        advice: what to do, for the end of the message.

    Raises:
        TrainingError: on every worker, if the values of one differ from the first worker's.
    """
    text = json.dumps({name: as_text(value) for name, value in values.items()}).encode()
    digest = np.frombuffer(hashlib.blake2b(text, digest_size=16).digest(), np.int32)
    heads = from_each_worker(reduction, np.append(digest, np.int32(len(text))))
    if (heads == heads[0]).all():
        return
    lengths = heads[:, -1]
    numbers = np.zeros(lengths.max(), np.int32)  # every collective can sum this dtype
    numbers[: len(text)] = np.frombuffer(text, np.uint8)
    rows = from_each_worker(reduction, numbers).astype(np.uint8)
    of_each = [json.loads(bytes(row[:n])) for row, n in zip(rows, lengths, strict=True)]
    tasks, of_first = reduction.task_names(), of_each[0]
    floats: list[str] = []
    for task, of_other in zip(tasks, of_each, strict=True):
        errors: list[str] = []
        for name in {**of_first, **of_other}:
            first, other = (values.get(name, "nothing") for values in (of_first, of_other))
            if first != other:
                same_kind = _FLOATS.sub(r"\1", first) == _FLOATS.sub(r"\1", other)
                (floats if same_kind else errors).append(
                    f"{name} must be the same on all workers, but is {first[:_SHOWN]} on {tasks[0]}"
                    f" and {other[:_SHOWN]} on {task}"
                )
        if errors:
            raise TrainingError(f"{'; '.join(errors[:_MOST])}. {advice}")
    if reduction.is_chief:
        warn(
            f"{'; '.join(floats[:_MOST])}. {advice} This is a warning because only floating-point"
            " values differ: if only rounding or an augmentation differs, nothing is wrong."
        )


def from_each_worker(reduction: Reduction, value: np.ndarray) -> np.ndarray:
    """Returns the number or array of each worker, in order; every worker must call."""
    table = np.zeros([reduction.workers, *value.shape], value.dtype)
    table[reduction.worker] = value
    return reduction.sum_over_workers(table)


def describe_data(batch: Structure, names: str) -> dict[str, Any]:
    """Returns the parts of a batch, or of a tuple of arrays, as values to compare.

    Args:
        names: what goes before "x" and "y" in messages.
    """
    values: dict[str, Any] = {}
    parts = () if batch is None else keras.utils.unpack_x_y_sample_weight(batch)
    for name, part in named_parts(parts):
        for number, tensor in enumerate(tf.nest.flatten(part, expand_composites=True)):
            array = np.asarray(tensor)
            suffix = f" (tensor {number})" if number else ""  # of a ragged or sparse one
            if name.startswith("x") and array.ndim:
                values.setdefault(f"batch size of {names}x", len(array))
            values[names + name + suffix] = describe_array(array)
    return values


def describe_model(model: keras.Model, created: Sequence[tf.Variable]) -> dict[str, Any]:
    """Returns name -> value; a config has one value for each of its leaves.

    Args:
        created: new variables, which need not belong to the model.
    """
    values: dict[str, Any] = {}
    values["new variables"] = [f"{new.dtype.name} {new.shape}" for new in created]
    for number, layer in enumerate(flat_layers(model)):
        name = f"layer {number} ({_NUMBER.sub('', layer.name)!r})"
        values.update(_object_values(name, layer))
        values[f"dtype of {name}"] = layer.dtype_policy.name
        if hasattr(layer, "adapt"):
            values.update(_adapted_values(name, layer))
    for number, variable in enumerate(model.variables):
        if variable.shape is not None:
            kind = [*variable.shape, variable.dtype, bool(variable.trainable)]
            values[f"variable {number} ({variable.name!r})"] = kind
    if model.compiled:
        values.update(compile_texts(model, ("optimizer", *LOSS_AND_METRICS)))
        values["steps_per_execution of compile()"] = model.steps_per_execution
        for setting in ("run_eagerly", "jit_compile"):
            values[f"{setting} of compile()"] = bool(getattr(model, setting))
    return values


def compile_texts(model: keras.Model, arguments: Sequence[str]) -> dict[str, str]:
    """Returns name -> text of some arguments of `compile`."""
    try:
        settings = compile_arguments(model)
    except (AttributeError, TypeError):  # the model has a compile() of its own
        settings = {"optimizer": getattr(model, "optimizer", None)}
    values: dict[str, Any] = {}
    for key in arguments:
        for path, leaf in keras.tree.flatten_with_path(settings.get(key)):
            name = " ".join([key, *map(str, path)])
            is_object = hasattr(leaf, "get_config")
            values |= _object_values(name, leaf) if is_object else {name: leaf}
    return {name: as_text(value) for name, value in values.items()}


def _adapted_values(name: str, layer: keras.Layer) -> Iterator[tuple[str, Any]]:
    """Yields the vocabulary and the statistics of a preprocessing layer."""
    if hasattr(layer, "get_vocabulary"):
        with contextlib.suppress(TypeError, ValueError, RuntimeError):  # not adapted yet
            vocabulary = np.array(list(map(str, layer.get_vocabulary())))
            yield f"vocabulary of {name}", describe_array(vocabulary)
    for key, value in vars(layer).items():
        if isinstance(value, np.ndarray | tf.Tensor) and not tf.is_symbolic_tensor(value):
            yield f"{key} of {name}", describe_array(np.asarray(value))


def _object_values(name: str, thing: Any) -> Iterator[tuple[str, Any]]:
    """Yields the class of a Keras object, and the leaves of its config."""
    yield f"class of {name}", type(thing).__name__
    if not is_graph_of_layers(thing):  # its config repeats its layers
        with warnings.catch_warnings(), contextlib.suppress(Exception):  # a user's get_config
            warnings.simplefilter("ignore")  # a lambda in a config
            yield from list(_leaves(name, dict(thing.get_config())))


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    match value:
        case dict():
            for key, part in value.items():
                # A learning rate that is no schedule is a variable, which follows the chief.
                rate = key == "learning_rate" and isinstance(part, float)
                if key not in _LEFT_OUT and not str(key).endswith("_seed") and not rate:
                    is_object = key in ("class_name", "config")  # a serialized one
                    yield from _leaves(name if is_object else f"{key} of {name}", part)
        case list() | tuple() if any(isinstance(part, dict | list | tuple) for part in value):
            for number, part in enumerate(value):
                yield from _leaves(f"{name}[{number}]", part)
        case np.ndarray():
            yield name, describe_array(value)
        case str():  # a folder may differ between machines
            file = value.rpartition("/")[2] if value.startswith("/") else value
            yield name, _NUMBER.sub("", file)
        case _:
            yield name, value


def as_text(value: Any) -> str:
    """The text of a value that is compared; of data and other objects the name of the class."""
    match value:
        case dict():
            return str({str(key): as_text(value[key]) for key in sorted(value, key=str)})
        case list() | tuple():
            return f"[{', '.join(map(as_text, value))}]"
        case None | bool() | int() | float() | str() | np.generic():
            return str(value)
        case tf.data.Dataset():  # its classes have many names
            return "a tf.data.Dataset"
    return str(getattr(value, "__qualname__", type(value).__name__))


def describe_array(array: np.ndarray) -> str:
    """Describes an array by its dtype, shape and a checksum; of a large array, of a sample."""
    flat = array.reshape(-1)
    flat = flat[:: flat.size // _SAMPLE | 1]  # odd: not one channel alone
    shape = list(array.shape)
    if array.dtype.kind in "OSU":
        texts = [value if isinstance(value, bytes) else str(value).encode() for value in flat]
        first = [text[:40].decode(errors="replace") for text in texts[:_FEW]]
        checksum = zlib.crc32(b"\0".join(texts))
        return f"{first}... of shape {shape} with the checksum {checksum}"
    checksum = zlib.crc32(np.ascontiguousarray(flat).tobytes())
    return f"{array.dtype.name} {shape} {flat[:_FEW].tolist()}... with the checksum {checksum}"
