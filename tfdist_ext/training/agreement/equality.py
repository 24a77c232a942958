"""Calls, data and models that must be equal on all workers: an error before the first step.

Each worker takes its part of what it believes to be the global batch. If calls differ, workers wait
for each other forever. If data differs, as after a shuffle without a seed or where each worker
loads a part, some examples are used twice and others never, and nothing fails.

What is compared is a flat dict from names to texts. Workers exchange a hash of the dict. Only if
the hashes differ, the workers exchange the texts.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist_ext.data.pipelines import Structure, named_parts
from tfdist_ext.errors import TrainingError
from tfdist_ext.training.agreement.model_description import as_text, describe_array
from tfdist_ext.training.agreement.task_status import Reduction
from tfdist_ext.user_frames import warn

_SHOWN, _MOST = 200, 3  # characters of a text, differences
_FLOATS = re.compile(r"^(b?float\S+ \[[\d, ]*\]) .*")  # text of an array; its kind
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

    Of arguments, what decides how many steps a call has and what the steps do is compared: of data
    only the kind, of paths only whether there is one. Arrays of floats may differ with a warning,
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
