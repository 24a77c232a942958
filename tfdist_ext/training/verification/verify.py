"""tfd.verify: the same training in plain Keras on one device and on a strategy, compared."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import keras
import tensorflow as tf

from tfdist_ext.errors import TfDistError, TrainingError
from tfdist_ext.training.verification.causes import probable_causes
from tfdist_ext.training.verification.result import Verification, relative_differences
from tfdist_ext.training.verification.trainings import Builder, Trainings
from tfdist_ext.user_frames import filter_traceback

__all__ = ["verify"]


@filter_traceback
def verify(
    builder: Builder,
    data: Any,
    strategy: tf.distribute.Strategy,
    *,
    steps: int | None = 3,
    tolerance: float = 1e-5,
    synchronize_batch_norm: bool | None = None,
    **fit: Any,
) -> Verification:
    """Trains a model in plain Keras and on a strategy, and compares the numbers.

    Both trainings use the same few global batches, of which the last one is smaller. Compared are
    weights, other variables, optimizer state, logs, and predictions after the training. With
    several workers, every worker makes this call with the same data.

    Args:
        builder: a function that creates the compiled model. It is called several times.
        data: arrays `(x, y)` or `(x, y, sample_weight)`, or a dataset that yields global batches.
        strategy: a synchronous strategy, as of `tfd.create_strategy`.
        steps: global batches to train on; None: all of the data.
        tolerance: largest relative difference that counts as equal. A larger difference counts as
            equal, too, if rounding explains it: if plain Keras differs as much from itself after
            the last bit of the inputs was changed.
        synchronize_batch_norm: as of `tfd.distribute`.
        fit: more arguments of `fit`, such as `batch_size` (global) and `epochs`. Arrays are not
            shuffled unless `shuffle=True` is among them.

    Raises:
        TrainingError: the strategy trains asynchronously; `builder` is not a function; the data
            has no batch.
        ValueError: what plain Keras refuses.
    """
    if isinstance(strategy, tf.distribute.ParameterServerStrategy):
        raise TrainingError(
            "verify cannot compare parameter servers with one device, because they train"
            ' asynchronously. Verify the model with create_strategy("mirrored", logical_cpus=4).'
        )
    if isinstance(builder, keras.Model) or not callable(builder):
        raise TrainingError(
            f"verify creates the model several times, so it needs a function, got {builder!r}."
        )
    with _without_retracing_warnings():
        trainings = Trainings(builder, strategy, data, steps, fit, synchronize_batch_norm)
        return _compare(trainings, tolerance)


def _compare(trainings: Trainings, tolerance: float) -> Verification:
    plain = trainings.plain()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = trainings.distributed()
    except TfDistError as error:
        return Verification(trainings.title, {}, {}, tolerance, error=str(error))
    differences = relative_differences(found, plain)
    if trainings.reading_difference:
        differences["data first batch"] = trainings.reading_difference
    rounding: Mapping[str, float] = {}
    if max(differences.values()) > tolerance:
        rounding = relative_differences(trainings.plain(last_bit=True), plain)
    result = Verification(trainings.title, differences, rounding, tolerance)
    if result.equal:
        return result
    texts = [str(each.message) for each in caught if each.category is UserWarning]
    causes = list(probable_causes(trainings, result, plain))
    return replace(result, causes=causes, warnings=tuple(dict.fromkeys(texts)))


@contextlib.contextmanager
def _without_retracing_warnings() -> Iterator[None]:
    """Scope in which TensorFlow does not warn that each new model is traced anew."""
    logger = tf.get_logger()
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
