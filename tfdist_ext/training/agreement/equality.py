"""Calls, data and models that must be equal on all workers: an error before the first step.

Each worker takes its part of what it believes to be the global batch. If calls differ, workers wait
for each other forever. If data differs, as after a shuffle without a seed or where each worker
loads a part, some examples are used twice and others never, and nothing fails.

What is compared is a flat dict from names to texts. Workers exchange a hash of the dict. Only if
the hashes differ, the workers exchange the texts.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist_ext.data.pipelines import PY_FUNCTIONS, Structure, operations_of
from tfdist_ext.data.sharded import ShardedDataset
from tfdist_ext.errors import TrainingError
from tfdist_ext.training import _keras_private as kp
from tfdist_ext.training.agreement.single_task import Reduction
from tfdist_ext.user_frames import warn

SAME_ARGUMENTS = (
    "give every worker the same data and the same arguments, as one device would get: each takes"
    " its own part of every global batch."
)
SAME_MODEL = (
    "all workers train one model together. Build and compile the same model on every worker, from"
    " the same code and settings."
)

_RELATIVE, _SHOWN, _MOST = 1e-5, 200, 3  # noise of floats, characters of a text, differences
_FLOAT = re.compile(r"\d+\.\d+(?:e[-+]\d+)?|\d+e[-+]\d+")
_RANDOM = re.compile("Random|Multinomial|StatefulUniform|StatefulStandardNormal|StatefulTruncated")
# Names of what no augmentation changes: the number of rows, and one integer or text for each row.
_BATCH_SIZE, _LABELS = "batch size", "class labels "
_SAMPLE, _FEW = 1 << 18, 4  # elements of an array that are compared; that a text shows

# Of a config. Keras finds objects by module and registered name. Shapes are those of the variables.
# Names and seeds may differ. The code of a lambda contains the path of its file.
_LEFT_OUT = {"module", "registered_name", "build_config", "build_input_shape", "seed", "name"}
_LEFT_OUT |= {"code", "defaults", "closure"}
_COMPILED = ("optimizer", "loss", "loss_weights", "metrics", "weighted_metrics")
_NUMBER = re.compile(r"_\d+$")  # which Keras adds to automatic names


def check_equal_across_workers(
    reduction: Reduction, values: Mapping[str, Any], advice: str
) -> None:
    """Compares values by name; every worker must call.

    Args:
        values: numbers, texts, and lists and dicts of them. Of other objects, such as data, only
            the class is compared.
        advice: what to do, for the end of the message.

    Raises:
        TrainingError: on every worker, if the values of one differ from the first worker's.
    """
    texts = {_name(path): _text(leaf) for path, leaf in keras.tree.flatten_with_path(values)}
    if found := _differences(reduction, texts):
        raise TrainingError(f"{_sentences(found)}: {advice}")


def check_equal_models(
    reduction: Reduction, model: keras.Model, created: Iterable[tf.Variable]
) -> None:
    """Compares what a model computes with; every worker must call.

    Weights and the learning rate follow the chief's, so they may differ.

    Args:
        created: new variables, which need not belong to the model.

    Raises:
        TrainingError: as `check_equal_across_workers`.
    """
    if reduction.multi_worker:
        values = dict(_model_values(model))
        values["new variables"] = str([f"{new.dtype.name} {new.shape}" for new in created])
        check_equal_across_workers(reduction, values, SAME_MODEL)


def check_equal_positions(reduction: Reduction, data: ShardedDataset) -> None:
    """Compares positions in the data, and what decides the order of ordered data.

    Every worker must call. Time stamps of files are not compared, because each machine may have a
    copy.

    Raises:
        TrainingError: as `check_equal_across_workers`.
    """
    state = data.state()
    state["fingerprint"] = {**state["fingerprint"], "time stamps": ""}
    advice = "every worker must be given the same ShardedDataset, at the same position."
    check_equal_across_workers(reduction, {"the data's state": state}, advice)


def check_equal_data(
    reduction: Reduction,
    data: Structure,
    names: str = "",
    dataset: tf.data.Dataset | None = None,
) -> None:
    """Compares arrays that each worker holds whole, or a first batch; every worker must call.

    If a pipeline draws random numbers or calls Python, as an augmentation does, inputs may differ
    with a warning. Batch sizes and class labels may not.

    Args:
        names: what goes before "x" and "y" in messages.
        dataset: the pipeline of the first batch.

    Raises:
        TrainingError: as `check_equal_across_workers`.
    """
    if not (found := _differences(reduction, dict(_data_texts(data, names)))):
        return
    message = (
        f"{_sentences(found)}: each worker takes its own part of the same global batches, so some"
        " examples would be used twice and others never. Give every worker the same data, batch"
        " size and order (a seed for shuffle(), or the same keras.utils.set_random_seed() on every"
        " worker before the data is made); or let each worker read its own examples with"
        " tfd.data.from_dataset_fn()."
    )
    is_random = reduction.any_worker(dataset is not None and _is_random(dataset))
    if not is_random or any(name.startswith((_BATCH_SIZE, _LABELS)) for name in found):
        raise TrainingError(message)
    if reduction.is_chief:
        warn(
            f"{message} This is a warning because the pipeline draws random numbers or calls"
            " Python: if only an augmentation differs, nothing is wrong."
        )


def from_each_worker(reduction: Reduction, value: np.ndarray) -> np.ndarray:
    """Returns the number or array of each worker, in order; every worker must call."""
    table = np.zeros([reduction.workers, *value.shape], value.dtype)
    table[reduction.worker] = value
    return reduction.sum_over_workers(table)


def _differences(reduction: Reduction, texts: Mapping[str, str]) -> dict[str, str]:
    """Name -> a sentence, for the first worker that has other texts than worker 0.

    The result is the same on every worker; every worker must call.
    """
    if not reduction.multi_worker:
        return {}
    data = json.dumps(texts).encode()
    digest = np.frombuffer(hashlib.blake2b(data, digest_size=16).digest(), np.int32)
    heads = from_each_worker(reduction, np.append(digest, np.int32(len(data))))
    if (heads == heads[0]).all():
        return {}
    lengths = heads[:, -1]
    numbers = np.zeros(lengths.max(), np.int32)  # every collective can sum this dtype
    numbers[: len(data)] = np.frombuffer(data, np.uint8)
    rows = from_each_worker(reduction, numbers).astype(np.uint8)
    first, *others = (json.loads(bytes(row[:n])) for row, n in zip(rows, lengths, strict=True))
    first_task, *tasks = reduction.task_names()
    for task, other in zip(tasks, others, strict=True):
        pairs = {n: (first.get(n, "nothing"), other.get(n, "nothing")) for n in first | other}
        if different := {name: pair for name, pair in pairs.items() if not _is_same(*pair)}:
            return {
                name: f"{name} must be the same on all workers, got {one[:_SHOWN]} on {first_task}"
                f" and {another[:_SHOWN]} on {task}"
                for name, (one, another) in different.items()
            }
    return {}


def _is_same(first: str, other: str) -> bool:
    """Whether two texts are equal, up to the noise of floats, as of another processor."""
    if _FLOAT.sub("", first) != _FLOAT.sub("", other):
        return False
    a, b = (np.array(_FLOAT.findall(text), np.float64) for text in (first, other))
    return bool(np.allclose(a, b, rtol=_RELATIVE, atol=1e-12))


def _sentences(found: Mapping[str, str]) -> str:
    return "; ".join(list(found.values())[:_MOST])


def _name(path: Sequence[Any]) -> str:
    """Returns the name of a leaf, as "item 0 of validation_freq"."""
    return " of ".join(f"item {key}" if isinstance(key, int) else str(key) for key in path[::-1])


def _text(leaf: Any) -> str:
    if leaf is None or isinstance(leaf, bool | int | float | str | np.generic):
        return str(leaf)
    if isinstance(leaf, tf.data.Dataset):  # its classes have many names
        return "a tf.data.Dataset"
    return str(getattr(leaf, "__qualname__", type(leaf).__name__))


def _model_values(model: keras.Model) -> Iterator[tuple[str, Any]]:
    """Yields layers, variables, and the arguments of `compile`."""
    layers = kp.flat_layers(model)
    yield "the number of layers", len(layers)
    for number, layer in enumerate(layers):
        name = f"layer {number} ({_NUMBER.sub('', layer.name)!r})"
        values = {**_config(layer), "dtype": layer.dtype_policy.name}
        yield name, values | _adapted(layer) if hasattr(layer, "adapt") else values
    for number, variable in enumerate(model.variables):
        if variable.shape is not None:
            kind = f"{variable.dtype} {tuple(variable.shape)}, trainable: {variable.trainable}"
            yield f"variable {number} ({variable.name!r})", kind
    if not model.compiled:
        return
    try:
        settings = kp.compile_arguments(model)
    except (AttributeError, TypeError):  # the model has a compile() of its own
        settings = {"optimizer": getattr(model, "optimizer", None)}
    for path, leaf in keras.tree.flatten_with_path([settings.get(key) for key in _COMPILED]):
        value = _config(leaf) if hasattr(leaf, "get_config") else leaf
        yield _name((_COMPILED[path[0]], *path[1:])), value
    yield "steps_per_execution of compile()", model.steps_per_execution
    yield "run_eagerly of compile()", bool(model.run_eagerly)


def _config(thing: Any) -> dict[str, Any]:
    """Returns the class of a Keras object, and the leaves of its config."""
    values = {"class": type(thing).__name__}
    if kp.is_graph_of_layers(thing):  # its config repeats its layers
        return values
    with warnings.catch_warnings(), contextlib.suppress(Exception):  # a user's get_config
        warnings.simplefilter("ignore")  # a lambda in a config
        for path, leaf in keras.tree.flatten_with_path(thing.get_config()):
            is_rate = path[-1] == "learning_rate" and isinstance(leaf, float)
            if _LEFT_OUT.isdisjoint(path) and not str(path[-1]).endswith("_seed") and not is_rate:
                name = _name([key for key in path if key not in ("class_name", "config")])
                values[name] = _config_leaf(leaf)
    return values


def _config_leaf(leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray):
        return _array_text(leaf)
    if isinstance(leaf, str):  # a folder may differ between machines
        leaf = leaf.rpartition("/")[2] if leaf.startswith("/") else leaf
        return _NUMBER.sub("", leaf)
    return leaf


def _adapted(layer: keras.Layer) -> dict[str, str]:
    """Returns the vocabulary and the statistics of a preprocessing layer."""
    arrays = {
        key: np.asarray(value)
        for key, value in vars(layer).items()
        if isinstance(value, np.ndarray | tf.Tensor) and not tf.is_symbolic_tensor(value)
    }
    if hasattr(layer, "get_vocabulary"):
        with contextlib.suppress(TypeError, ValueError, RuntimeError):  # not adapted yet
            arrays["vocabulary"] = np.array(list(map(str, layer.get_vocabulary())))
    return {key: _array_text(array) for key, array in arrays.items()}


def _data_texts(batch: Structure, names: str) -> Iterator[tuple[str, str]]:
    """Yields the parts of a batch, or of a tuple of arrays."""
    parts = [None] if batch is None else keras.utils.unpack_x_y_sample_weight(batch)
    for part, structure in zip(("x", "y", "sample_weight"), parts, strict=False):
        for path, leaf in keras.tree.flatten_with_path(structure):
            if leaf is None or isinstance(leaf, tf.experimental.Optional):
                continue
            for number, tensor in enumerate(tf.nest.flatten(leaf, expand_composites=True)):
                array = np.asarray(tensor)
                suffix = f" (tensor {number})" if number else ""  # of a ragged or sparse one
                name = names + part + "".join(f"[{key!r}]" for key in path) + suffix
                if part == "x" and array.ndim:
                    yield f"{_BATCH_SIZE} of {name}", str(len(array))
                one_each = math.prod(array.shape[1:]) == 1
                is_label = part == "y" and one_each and array.dtype.kind in "biuOSU"
                yield _LABELS * is_label + name, _array_text(array)


def _array_text(array: np.ndarray) -> str:
    """Describes an array, so that equal texts mean equal arrays.

    The text has a checksum; of floats it has weighted sums, because another processor may round
    differently. Of a large array they are of a sample.
    """
    flat = array.reshape(-1)
    flat = flat[:: flat.size // _SAMPLE | 1]  # odd: not one channel alone
    kind = f"{array.dtype.name} {list(array.shape)}"
    if array.dtype.kind == "f":
        numbers = np.nan_to_num(flat.astype(np.float64), nan=12345.678).clip(-1e30, 1e30)
        weights = 3 + np.arange(numbers.size) % 97 / 97  # an order counts, too
        size = float(np.abs(numbers).sum())
        # Not small beside the size, from which the noise comes.
        weighted = float(5 * size + (weights * numbers).sum())
        return f"{kind} with the sums {size} and {weighted}"
    is_text = array.dtype.kind in "OSU"
    data = "\0".join(map(str, flat.tolist())).encode() if is_text else flat.tobytes()
    return f"{flat[:_FEW].tolist()}... ({kind}, checksum {zlib.crc32(data)})"


def _is_random(dataset: tf.data.Dataset) -> bool:
    """Whether a pipeline may draw random numbers or call Python."""
    try:
        operations = operations_of(dataset)
    except (tf.errors.OpError, ValueError):  # more than fits into a message
        return True
    return any(_RANDOM.search(name) or name in PY_FUNCTIONS for name in operations)
