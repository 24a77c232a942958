"""A warning where workers are given different data.

Each worker cuts its part out of what it takes for the global batch. Where the batches differ, as
after a shuffle without a seed, some examples are used twice and others never, and nothing fails.
"""

from __future__ import annotations

import warnings
import zlib
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist_ext.training import _keras_private as kp
from tfdist_ext.training.reduction import Reduction

__all__ = ["warn_of_different_data"]


def warn_of_different_data(x: Any, reduction: Reduction) -> None:
    """Compare the labels of the first batch that each worker reads; the chief warns.

    Labels, because inputs may differ rightly: augmentation is random on each worker.
    """
    if not reduction.multi_worker or not kp.is_tf_dataset(x):
        return
    mine = _labels_of_first_batch(x)
    differs = reduction.any_worker(mine != int(reduction.from_chief(mine)))
    if differs and reduction.is_chief:
        warnings.warn(
            "the workers read different data: their first batches have different labels. Each"
            " worker takes its part of the same global batches, so now some examples are used"
            " twice and others never. Give shuffle() a seed, or call"
            " keras.utils.set_random_seed() with the same number on every worker before the"
            " dataset is made.",
            stacklevel=4,
        )


def _labels_of_first_batch(dataset: tf.data.Dataset) -> int:
    """A number that stands for the labels, or for everything where there are none."""
    number = 0
    for batch in dataset.take(1):
        labels = batch[1] if isinstance(batch, tuple) and len(batch) > 1 else batch
        for part in keras.tree.flatten(labels):
            if isinstance(part, tf.Tensor):
                values = np.asarray(part)
                text = values.tobytes() if values.dtype != object else str(values).encode()
                number = zlib.crc32(text, number)
    return number
