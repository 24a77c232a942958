"""Workers that make different calls, or are given different data: said before the first step.

Each worker cuts its part out of what it takes for the global batch. Where calls differ, workers
wait for each other for ever. Where data differs, as after a shuffle without a seed or where each
worker loads a part, some examples are used twice and others never, and nothing fails.
"""

from __future__ import annotations

import json
import warnings
import zlib
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist_ext.data.ordered import OrderedDataset
from tfdist_ext.data.sharded import ShardedDataset
from tfdist_ext.errors import TrainingError
from tfdist_ext.training import _keras_private as kp
from tfdist_ext.training.reduction import Reduction

__all__ = ["check_same_call", "check_same_position", "warn_of_different_data"]


def check_same_call(reduction: Reduction, **numbers: int | None) -> None:
    """Compare what decides how many steps there are; every worker must call.

    Raises:
        TrainingError: on every worker, where one's numbers are not the chief's.
    """
    if not reduction.multi_worker:
        return
    mine = np.array([-1 if value is None else int(value) for value in numbers.values()])
    chiefs = reduction.from_chief(mine)
    if reduction.any_worker(not np.array_equal(mine, chiefs)):
        shown = [
            f"{name} {'none' if number < 0 else number}"
            for name, number in zip(numbers, chiefs.tolist(), strict=True)
        ]
        here = [
            f"{name} {'none' if number < 0 else number}"
            for name, number, chief in zip(numbers, mine.tolist(), chiefs.tolist(), strict=True)
            if number != chief
        ]
        raise TrainingError(
            "the workers make different calls: the chief has "
            + ", ".join(shown)
            + (f"; this worker has {', '.join(here)}. " if here else "; another worker differs. ")
            + "Give every worker the same data and the same arguments, as one device would get:"
            " each takes its own part of every global batch."
        )


def check_same_position(reduction: Reduction, data: ShardedDataset) -> None:
    """Compare where workers are in their data, and of ordered data all that decides its order.

    Every worker must call. Time stamps of files are not compared: each machine may have a copy.

    Raises:
        TrainingError: on every worker, where one's are not the chief's.
    """
    if not reduction.multi_worker:
        return
    epoch, behind = data.place
    numbers: dict[str, int | None] = {"epoch": epoch, "behind in it": behind}
    if isinstance(data, OrderedDataset):
        content = {**data.source.fingerprint(), "time stamps": ""}
        as_text = json.dumps(content, sort_keys=True, default=str)
        numbers |= {
            "global_batch": data.global_batch,
            "examples": data.examples,
            "seed": data.order.seed,
            "fingerprint of the data": zlib.crc32(as_text.encode()),
        }
    check_same_call(reduction, **numbers)


def warn_of_different_data(x: Any, y: Any, reduction: Reduction) -> None:
    """Compare the labels that each worker was given (of a data set, its first batch's).

    Labels, because inputs may differ rightly: augmentation is random on each worker.
    """
    if not reduction.multi_worker:
        return
    if kp.is_tf_dataset(x):
        labels = next(iter(x.take(1)), None)
    elif isinstance(x, keras.utils.PyDataset):
        labels = x[0]
    else:
        labels = (None, y)
    if isinstance(labels, tuple) and len(labels) > 1:
        labels = labels[1]
    mine = _number_for(labels)
    differs = reduction.any_worker(mine != int(reduction.from_chief(mine)))
    if differs and reduction.is_chief:
        warnings.warn(
            "the workers read different data: their labels differ. Each worker takes its part of"
            " the same global batches, so now some examples are used twice and others never. Give"
            " every worker the same data, and shuffle() a seed; or call"
            " keras.utils.set_random_seed() with the same number on every worker before the data"
            " is made.",
            stacklevel=5,
        )


def _number_for(labels: Any) -> int:
    """A number that stands for the labels; 0 where there are none."""
    number = 0
    for part in keras.tree.flatten(labels):
        if isinstance(part, tf.Tensor) or hasattr(part, "__array__"):
            values = np.ascontiguousarray(np.asarray(part))
            text = str(values).encode() if values.dtype == object else values.tobytes()
            number = zlib.crc32(text, number)
    return number
