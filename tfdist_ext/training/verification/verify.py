"""tfd.verify: the same training in plain Keras on one device and on a strategy, compared.

Each probable cause of a difference has an experiment: the same training with another setting, or
the loss of plain Keras on other batches.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist_ext.data.pipelines import rows_between
from tfdist_ext.errors import TfDistError, TrainingError
from tfdist_ext.training.building.build import batch_normalization_layers
from tfdist_ext.training.protocols import Structure
from tfdist_ext.training.verification.result import Results, Verification, relative_differences
from tfdist_ext.training.verification.trainings import Trainings, dataset_of
from tfdist_ext.user_frames import filter_traceback

__all__ = ["verify"]

_ORDER = (
    "The data comes in another order at each reading. Give shuffle() a seed and"
    " reshuffle_each_iteration=False, or use tfd.data.from_arrays."
)
_NOT_REPRODUCIBLE = (
    "Plain Keras does not repeat its own numbers with the same seeds. Seed all random numbers"
    " (keras.utils.set_random_seed), then verify again."
)
_NUMPY = (
    "The model draws random numbers from np.random, which replicas do not share (rule 6). Draw"
    " from keras.random with a keras.random.SeedGenerator."
)
_BATCH_NORM = (
    "BatchNormalization normalizes the rows of each replica by themselves (rule 5). Pass"
    " synchronize_batch_norm=True to tfd.distribute to normalize over the global batch."
)
_SUM = (
    "The loss is a sum over rows, or a sum divided by a constant such as the batch size (rule 2)."
    " Return one loss per row, or take tf.reduce_mean over the rows."
)
_RATIO = (
    "The loss is a ratio of two sums over rows, as a masked mean is. Each replica divides its own"
    " sums (rule 2). Call tfd.all_rows on the losses and the mask first, or return one loss per"
    " row with a sample weight."
)
_PAIRS = (
    "The loss compares rows with each other, as in-batch negatives do. Each replica sees only its"
    " own rows (rule 7). Call tfd.all_rows on the features before they are compared."
)
_VARIABLE = (
    "A step writes a value that depends on its rows, such as a count, to {} (rule 5). Compute the"
    " value from tfd.all_rows, so that all replicas write the same, or count in a Keras metric."
)
_METRIC = (
    "The metric {} is not made of sums over rows: it averages a number of each batch (rule 4)."
    " Add up numerator and denominator in two variables, and divide in result()."
)
_UNKNOWN = "No experiment found the cause. Read what the rules do not cover, in docs/exactness.md."


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
            shuffled.

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
        causes = list(_probable_causes(trainings, strategy, result, plain))
        result = replace(result, causes=causes)
    return result


def _probable_causes(
    trainings: Trainings, strategy: tf.distribute.Strategy, result: Verification, plain: Results
) -> Iterator[str]:
    """Yields the causes that experiments find, with their remedies."""

    def unequal(*args: Any, **options: Any) -> list[str]:
        differences = relative_differences(trainings.train(*args, **options), plain)
        return [name for name, value in differences.items() if value > result.allowed(name)]

    if trainings.order_changes:
        yield _ORDER
    names = [name for name in result.unequal if not name.startswith("data ")]
    if not names:
        return
    if unequal():
        yield _NOT_REPRODUCIBLE
        return
    if unequal(numpy_seed=7331):
        yield _NUMPY
        return
    layers = batch_normalization_layers(trainings.new_model())
    if any(not layer.synchronized for layer in layers):
        remaining = unequal(strategy, synchronize_batch_norm=True)
        if len(remaining) < len(names):
            yield _BATCH_NORM
            names = remaining
    if names:
        yield from _causes_by_place(names, trainings) or [_UNKNOWN]


def _causes_by_place(unequal: list[str], trainings: Trainings) -> list[str]:
    """Returns causes by what differs: trained weights, other variables, or only logs."""
    names: dict[str, list[str]] = {"weight": [], "variable": [], "log": []}
    for kind, _, name in (each.partition(" ") for each in unequal):
        names.setdefault(kind, []).append(name)
    causes = [_VARIABLE.format(name) for name in names["variable"]]
    if names["weight"]:
        # A custom step may refuse other batches.
        with contextlib.suppress(Exception):
            causes = [*_causes_in_loss(trainings), *causes]
    elif metrics := [name for name in names["log"] if not name.endswith("loss")]:
        causes.append(_METRIC.format(", ".join(metrics)))
    return causes


def _causes_in_loss(trainings: Trainings) -> Iterator[str]:
    """Tells the kind of a loss by its value for a batch, its rows twice, and its halves."""
    batch, rows = trainings.batches[0], trainings.rows[0]
    half = rows // 2
    if not half:
        return

    def loss_of(*batches: Structure) -> float:
        model, data = trainings.new_model(), dataset_of(batches).unbatch().batch(2 * rows)
        if type(model).train_step is keras.Model.train_step:  # evaluate has no dropout
            return float(model.evaluate(data, verbose=0, return_dict=True)["loss"])
        return float(model.fit(data, verbose=0).history["loss"][0])

    whole, doubled = loss_of(batch), loss_of(batch, batch)
    first, second = loss_of(rows_between(batch, 0, half)), loss_of(rows_between(batch, half, rows))
    if not _close(doubled, whole):
        yield _SUM if _close(doubled, 2 * whole) else _PAIRS
    elif not _close((half * first + (rows - half) * second) / rows, whole):
        yield _RATIO


def _close(a: float, b: float) -> bool:
    return bool(np.isclose(a, b, rtol=1e-3, atol=1e-6))
