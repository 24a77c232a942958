"""Workers that make different calls, or are given different data: an error before the first step.

Each worker cuts its part out of what it takes for the global batch. Where calls differ, workers
wait for each other forever. Where data differs, as after a shuffle without a seed or where each
worker loads a part, some examples are used twice and others never, and nothing fails.
"""

from __future__ import annotations

import json
import re
import warnings
import zlib
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist_ext.data.ordered import OrderedDataset
from tfdist_ext.data.pipelines import operations_of
from tfdist_ext.data.sharded import ShardedDataset
from tfdist_ext.errors import TrainingError
from tfdist_ext.training.array_description import describe_array
from tfdist_ext.training.equality import (
    Difference,
    check_equal_across_workers,
    difference_between_workers,
)
from tfdist_ext.training.global_batches import GlobalBatches
from tfdist_ext.training.reduction import Reduction

__all__ = ["check_same_arrays", "check_same_call", "check_same_position", "first_batch_check"]

_RANDOM = re.compile("Random|Multinomial|StatefulUniform|StatefulStandardNormal|StatefulTruncated")
_PYTHON = {"PyFunc", "PyFuncStateless", "EagerPyFunc"}


def check_same_call(reduction: Reduction, call: str, arguments: Mapping[str, Any]) -> None:
    """Compare what decides how many steps there are and what they do; every worker must call.

    Args:
        call: the method, as "fit".
        arguments: name -> value; of data only what kind it is, of paths only that there is one.

    Raises:
        TrainingError: on every worker, where one's arguments are not the first worker's.
    """
    if reduction.multi_worker:
        values = {name: _as_json(value) for name, value in arguments.items()}
        advice = (
            f"give every worker the same data and the same arguments of {call}(), as one device"
            " would get: each takes its own part of every global batch."
        )
        check_equal_across_workers(reduction, {"the call": call, **values}, advice)


def check_same_position(reduction: Reduction, data: ShardedDataset) -> None:
    """Compare where workers are in their data, and of ordered data all that decides its order.

    Every worker must call. Time stamps of files are not compared: each machine may have a copy.

    Raises:
        TrainingError: on every worker, where one's are not the first worker's.
    """
    if not reduction.multi_worker:
        return
    epoch, steps = data.position
    values: dict[str, Any] = {"epoch of the data": epoch, "position in the epoch": steps}
    if isinstance(data, OrderedDataset):
        content = {**data.source.fingerprint(), "time stamps": ""}
        as_text = json.dumps(content, sort_keys=True, default=str)
        values |= {
            "global_batch_size": data.global_batch_size,
            "number of examples": data.examples,
            "seed": data.order.seed,
            "fingerprint of the data": zlib.crc32(as_text.encode()),
        }
    advice = "every worker must be given the same ShardedDataset, at the same position."
    check_equal_across_workers(
        reduction, {name: _as_json(value) for name, value in values.items()}, advice
    )


def check_same_arrays(reduction: Reduction, batches: GlobalBatches, names: str = "") -> None:
    """Compare arrays that each worker holds whole; every worker must call.

    Args:
        names: what goes before "x" and "y" in messages.

    Raises:
        TrainingError: on every worker, where one's are not the first worker's.
    """
    if reduction.multi_worker and batches.arrays is not None:
        advice = (
            "each worker takes its own part of the same global batches, so give all of them the"
            " same arrays. Where each has examples of its own, use tfd.data.from_dataset_fn()."
        )
        check_equal_across_workers(reduction, _described(batches.arrays, names), advice)


def first_batch_check(
    reduction: Reduction, dataset: tf.data.Dataset | None, names: str = ""
) -> Callable[[Any], None] | None:
    """What compares the first batch of a dataset that each worker reads whole; None on one worker.

    Inputs may differ rightly where a pipeline draws random numbers or calls Python, as an
    augmentation does: then there is a warning. Batch sizes and class labels may not.

    Args:
        names: what goes before "x" and "y" in messages.
    """
    if not reduction.multi_worker or dataset is None:
        return None

    def check(batch: Any) -> None:
        described = _described(batch, names)
        difference = difference_between_workers(reduction, described)
        if difference is None:
            return
        decides = any(name in difference.values for name in _decisive(described, names))
        random = not decides and reduction.any_worker(_is_random(dataset))
        message = _about_batch(difference)
        if not random:
            raise TrainingError(message)
        if reduction.is_chief:
            warnings.warn(
                f"{message} This is a warning because the pipeline draws random numbers or calls"
                " Python: if only an augmentation differs, nothing is wrong.",
                stacklevel=7,
            )

    return check


def _about_batch(difference: Difference) -> str:
    return (
        f"the first batch differs: {difference}: each worker takes its own part of the same global"
        " batches, so some examples would be used twice and others never. Give every worker the"
        " same data, batch size and order (a seed for shuffle(), or the same"
        " keras.utils.set_random_seed() on every worker before the data is made); or let each"
        " worker read its own examples with tfd.data.from_dataset_fn()."
    )


def _described(batch: Any, names: str) -> dict[str, Any]:
    """The parts of a batch, or of a tuple of arrays, as values to compare."""
    values: dict[str, Any] = {}
    if batch is None:
        return {f"{names}data": "no batch at all"}
    parts = keras.utils.unpack_x_y_sample_weight(batch)
    for part, structure in zip(("x", "y", "sample_weight"), parts, strict=True):
        for path, leaf in keras.tree.flatten_with_path(structure):
            name = names + part + "".join(f"[{key!r}]" for key in path)
            if leaf is None or isinstance(leaf, tf.experimental.Optional):
                continue
            tensors = tf.nest.flatten(leaf, expand_composites=True)
            for number, tensor in enumerate(tensors):
                suffix = f" ({number + 1} of {len(tensors)} tensors)" if len(tensors) > 1 else ""
                found = describe_array(tensor)
                if part == "x" and found["shape"]:
                    values.setdefault(f"{names}batch size", found["shape"][0])
                values[f"shape of {name}{suffix}"] = found["shape"]
                values[f"dtype of {name}{suffix}"] = found["dtype"]
                values[f"{name}{suffix}"] = found["content"]
    return values


def _decisive(described: Mapping[str, Any], names: str) -> list[str]:
    """What no augmentation changes: how many rows, and labels of one integer or text a row."""
    labels = [
        name
        for name, value in described.items()
        if name.startswith(f"{names}y")
        and "checksum" in value
        and np.prod(described[f"shape of {name}"][1:]) == 1
    ]
    return [f"{names}batch size", f"{names}data", *labels]


def _is_random(dataset: tf.data.Dataset) -> bool:
    """Whether a pipeline draws random numbers or calls Python; also where it does not tell."""
    try:
        operations = operations_of(dataset)
    except (tf.errors.OpError, ValueError):  # more than fits into a message
        return True
    return any(_RANDOM.search(name) or name in _PYTHON for name in operations)


def _as_json(value: Any) -> Any:
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _as_json(part) for key, part in value.items()}
    if isinstance(value, list | tuple | set):
        return [_as_json(part) for part in value]
    if isinstance(value, tf.data.Dataset):
        return "a tf.data.Dataset"
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic):
        return value.item()
    return type(value).__name__
