"""Calls, data and models that must be equal on all workers: an error before the first step.

Each worker takes its part of what it believes to be the global batch. If calls differ, workers wait
for each other forever. If data differs, as after a shuffle without a seed or where each worker
loads a part, some examples are used twice and others never, and nothing fails.

The values to compare are a dict from names to JSON values. Workers exchange a hash of it, and only
if the hashes differ the values themselves.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist_ext.data.ordered import OrderedDataset
from tfdist_ext.data.pipelines import PY_FUNCTIONS, operations_of
from tfdist_ext.data.sharded import ShardedDataset
from tfdist_ext.errors import TrainingError
from tfdist_ext.training.agreement.model_description import describe_array, describe_model
from tfdist_ext.training.agreement.single_task import Reduction
from tfdist_ext.training.protocols import Structure
from tfdist_ext.user_frames import warn

Value = Any  # what JSON holds; floats are equal up to noise, as of another processor
_RELATIVE, _SHOWN, _MOST = 1e-5, 120, 3  # noise of floats, characters of a value, differences
_RANDOM = re.compile("Random|Multinomial|StatefulUniform|StatefulStandardNormal|StatefulTruncated")


def check_equal_across_workers(
    reduction: Reduction, values: Mapping[str, Value], advice: str
) -> None:
    """Compares values by name; every worker must call.

    Args:
        values: name -> what JSON holds; of anything else its name is compared.
        advice: what to do, for the end of the message.

    Raises:
        TrainingError: on every worker, if the values of one differ from the first worker's.
    """
    if found := _differences(reduction, values):
        raise TrainingError(f"{_in_words(found)}: {advice}")


def _differences(reduction: Reduction, values: Mapping[str, Value]) -> dict[str, str]:
    """Name -> a sentence, for the first worker that has other values than worker 0.

    The result is the same on every worker; every worker must call.
    """
    if not reduction.multi_worker:
        return {}
    text = json.dumps(_as_json(values)).encode()
    digest = np.frombuffer(hashlib.blake2b(text, digest_size=16).digest(), np.int32)
    digests = from_each_worker(reduction, digest)
    different = np.flatnonzero((digests != digests[0]).any(axis=1)).tolist()
    names = reduction.task_names()
    first = _from_worker(reduction, text, 0) if different else {}
    for worker in different:
        other = _from_worker(reduction, text, worker)
        pairs = {name: (first.get(name), other.get(name)) for name in {**first, **other}}
        found = {
            name: f"{name} must be the same on all workers, got"
            f" {_got(*pair, names[0], names[worker])}"
            for name, pair in pairs.items()
            if not _same(*pair)
        }
        if found:
            return found
    return {}


def _in_words(found: Mapping[str, str]) -> str:
    more = len(found) - _MOST
    sentences = "; ".join(list(found.values())[:_MOST])
    return f"{sentences}; and {more} more differ" if more > 0 else sentences


def _got(a: Value, b: Value, first: str, other: str) -> str:
    """Two values of two workers, as words."""
    x, y = _short(a), _short(b)
    if x == y:
        return f"other values on {other} than on {first}, after the same first {x}"
    return f"{x} on {first} and {y} on {other}"


def _short(value: Value) -> str:
    if isinstance(value, dict) and "first" in value:
        value = value["first"]
    text = "nothing" if value is None else str(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def _same(a: Value, b: Value) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a if key != "first")
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, float) and isinstance(b, float):
        both_nan = math.isnan(a) and math.isnan(b)
        return both_nan or math.isclose(a, b, rel_tol=_RELATIVE, abs_tol=1e-12)
    return type(a) is type(b) and bool(a == b)


def from_each_worker(reduction: Reduction, value: np.ndarray) -> np.ndarray:
    """Each worker's number, or array of one shape, in worker order; every worker must call."""
    table = np.zeros([reduction.workers, *value.shape], value.dtype)
    table[reduction.worker] = value
    return reduction.sum_over_workers(table)


def _from_worker(reduction: Reduction, text: bytes, worker: int) -> dict[str, Value]:
    """The values of a worker, on every worker."""
    packed = zlib.compress(text) if reduction.worker == worker else b""
    size = int(reduction.sum_over_workers(np.int32(len(packed))))
    words = np.zeros(-(-size // 4), np.int32)  # a dtype that every collective can sum
    words.view(np.uint8)[: len(packed)] = np.frombuffer(packed, np.uint8)
    found = reduction.sum_over_workers(words).view(np.uint8)[:size].tobytes()
    return json.loads(zlib.decompress(found))


def _as_json(value: object) -> Value:
    if isinstance(value, Mapping):
        return {str(key): _as_json(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(part) for part in value]
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tf.data.Dataset):  # its classes have many names
        return "a tf.data.Dataset"
    return str(getattr(value, "__qualname__", type(value).__name__))


def check_equal_calls(reduction: Reduction, call: str, arguments: Mapping[str, Any]) -> None:
    """Compares what decides how many steps a call has and what they do; every worker must call.

    Args:
        call: the method, as "fit".
        arguments: name -> value; of data only the kind, of paths only whether there is one.

    Raises:
        TrainingError: as `check_equal_across_workers`.
    """
    advice = (
        f"give every worker the same data and the same arguments of {call}(), as one device"
        " would get: each takes its own part of every global batch."
    )
    check_equal_across_workers(reduction, arguments, advice)


def check_equal_positions(reduction: Reduction, data: ShardedDataset) -> None:
    """Compares positions in the data, and what decides the order of ordered data.

    Every worker must call. Time stamps of files are not compared, because each machine may have a
    copy.

    Raises:
        TrainingError: as `check_equal_across_workers`.
    """
    if not reduction.multi_worker:
        return
    values = {f"{name} in the data's state": value for name, value in data.state().items()}
    if isinstance(data, OrderedDataset):
        fingerprint = {**data.source.fingerprint(), "time stamps": ""}
        values["fingerprint in the data's state"] = fingerprint
    advice = "every worker must be given the same ShardedDataset, at the same position."
    check_equal_across_workers(reduction, values, advice)


def check_equal_arrays(reduction: Reduction, arrays: Structure, names: str = "") -> None:
    """Compares arrays that each worker holds whole; every worker must call.

    Args:
        names: what goes before "x" and "y" in messages.

    Raises:
        TrainingError: as `check_equal_across_workers`.
    """
    if arrays is not None:
        advice = (
            "each worker takes its own part of the same global batches, so give all of them the"
            " same arrays. Where each has examples of its own, use tfd.data.from_dataset_fn()."
        )
        check_equal_across_workers(reduction, _described(arrays, names), advice)


def check_equal_models(
    reduction: Reduction, model: keras.Model, created: Sequence[tf.Variable]
) -> None:
    """Compares what models compute with; every worker must call.

    Automatic names, seeds and weights may differ: weights follow the chief.

    Args:
        created: new variables, which need not belong to the model.

    Raises:
        TrainingError: as `check_equal_across_workers`.
    """
    described = describe_model(model)
    described["new variables"] = [f"{new.dtype.name} {new.shape}" for new in created]
    if found := _differences(reduction, described):
        raise TrainingError(
            f"the models differ: {_in_words(found)}. All workers train one model together: build"
            " and compile the same one on every worker, from the same code and settings."
        )


def first_batch_comparison(
    reduction: Reduction, dataset: tf.data.Dataset | None, names: str = ""
) -> Callable[[Structure], None] | None:
    """Returns a function that compares the first batch of a dataset that each worker reads whole.

    If the pipeline draws random numbers or calls Python, as an augmentation does, inputs may differ
    with a warning. Batch sizes and class labels may not.

    Args:
        dataset: None: nothing is compared.
        names: what goes before "x" and "y" in messages.
    """
    if dataset is None:
        return None

    def check(batch: Structure) -> None:
        described = _described(batch, names)
        found = _differences(reduction, described)
        if not found:
            return
        # Each worker decides from its own batch and pipeline; all of them must agree.
        decides = any(_is_decisive(name, described, names) for name in found)
        decides = reduction.any_worker(decides)
        random = reduction.any_worker(_is_random(dataset))
        message = (
            f"the first batch differs: {_in_words(found)}: each worker takes its own part of the"
            " same global batches, so some examples would be used twice and others never. Give"
            " every worker the same data, batch size and order (a seed for shuffle(), or the same"
            " keras.utils.set_random_seed() on every worker before the data is made); or let each"
            " worker read its own examples with tfd.data.from_dataset_fn()."
        )
        if decides or not random:
            raise TrainingError(message)
        if reduction.is_chief:
            warn(
                f"{message} This is a warning because the pipeline draws random numbers or calls"
                " Python: if only an augmentation differs, nothing is wrong."
            )

    return check


def _described(batch: Structure, names: str) -> dict[str, Value]:
    """The parts of a batch, or of a tuple of arrays, as values to compare."""
    values: dict[str, Value] = {}
    if batch is None:
        return {f"{names}data": "no batch at all"}
    parts = keras.utils.unpack_x_y_sample_weight(batch)
    for part, structure in zip(("x", "y", "sample_weight"), parts, strict=True):
        for path, leaf in keras.tree.flatten_with_path(structure):
            if leaf is None or isinstance(leaf, tf.experimental.Optional):
                continue
            for number, tensor in enumerate(tf.nest.flatten(leaf, expand_composites=True)):
                suffix = f" (tensor {number})" if number else ""  # of a ragged or sparse one
                name = names + part + "".join(f"[{key!r}]" for key in path) + suffix
                found = describe_array(tensor)
                if part == "x" and found["shape"]:
                    values.setdefault(f"{names}batch size", found["shape"][0])
                values[f"shape of {name}"] = found["shape"]
                values[f"dtype of {name}"] = found["dtype"]
                values[name] = found["content"]
    return values


def _is_decisive(name: str, described: Mapping[str, Value], names: str) -> bool:
    """Whether no augmentation changes this: how many rows, and one integer or text label a row."""
    if name in (f"{names}batch size", f"{names}data"):
        return True
    is_label = name.startswith(f"{names}y") and "checksum" in described.get(name, ())
    return is_label and math.prod(described[f"shape of {name}"][1:]) == 1


def _is_random(dataset: tf.data.Dataset) -> bool:
    """Whether a pipeline draws random numbers or calls Python; also where it does not tell."""
    try:
        operations = operations_of(dataset)
    except (tf.errors.OpError, ValueError):  # more than fits into a message
        return True
    return any(_RANDOM.search(name) or name in PY_FUNCTIONS for name in operations)
