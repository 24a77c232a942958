"""tfd.verify: the same training in plain Keras on one device and on a strategy, compared."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import keras
import tensorflow as tf

from tfdist_ext.errors import TfDistError, TrainingError
from tfdist_ext.training.verification.causes import probable_causes
from tfdist_ext.training.verification.result import Verification, relative_differences
from tfdist_ext.training.verification.trainings import Trainings
from tfdist_ext.user_frames import filter_traceback

__all__ = ["verify"]


@filter_traceback
def verify(
    builder: Callable[[], keras.Model],
    data: Any,
    strategy: tf.distribute.Strategy,
    *,
    steps: int = 3,
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
        steps: global batches to train on.
        tolerance: largest relative difference that counts as equal. A larger difference counts as
            equal, too, if rounding explains it: if plain Keras differs as much from itself after
            the last bit of the inputs was changed.
        synchronize_batch_norm: as of `tfd.distribute`.
        fit: more arguments of `fit`, such as `batch_size` (global) and `epochs`. Arrays are not
            shuffled unless `shuffle=True` is among them.

    Raises:
        TrainingError: the strategy trains asynchronously; `builder` is not a function; the data
            has no batch.
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
    with warnings.catch_warnings():
        warnings.simplefilter("default", UserWarning)  # no warning of a training is an error
        return _compare(
            Trainings(builder, data, steps, fit, synchronize_batch_norm), strategy, tolerance
        )


def _compare(
    trainings: Trainings, strategy: tf.distribute.Strategy, tolerance: float
) -> Verification:
    title = (
        f"{type(strategy).__name__} with {strategy.num_replicas_in_sync} replicas, compared with"
        f" plain Keras on one device. Rows in the global batches: {str(trainings.rows)[1:-1]}."
    )
    result = Verification(title, {}, {}, tolerance)
    plain = trainings.train()
    try:
        differences = relative_differences(trainings.train(strategy), plain)
    except TfDistError as error:
        return replace(result, error=str(error))
    if trainings.order_changes:
        differences["data first batch"] = float("inf")
    result = replace(result, differences=differences)
    if not result.equal:
        rounding = relative_differences(trainings.train(last_bit=True), plain)
        result = replace(result, rounding=rounding)
    if not result.equal:
        causes = list(probable_causes(trainings, strategy, result, plain))
        result = replace(result, causes=causes)
    return result
