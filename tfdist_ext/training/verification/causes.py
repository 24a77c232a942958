"""Finds out why a model trains differently on a strategy, for `tfd.verify`.

Each cause has an experiment: the same training with another setting, or the loss of plain Keras on
other batches.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import keras
import numpy as np
import tensorflow as tf

from tfdist_ext.data.rows import rows_between
from tfdist_ext.training.building.build import batch_normalization_layers
from tfdist_ext.training.protocols import Structure
from tfdist_ext.training.verification.result import Results, Verification, relative_differences
from tfdist_ext.training.verification.trainings import Trainings, dataset_of

__all__ = ["probable_causes"]

_ORDER = (
    "The data comes in another order at each reading. Give shuffle() a seed and"
    " reshuffle_each_iteration=False, or use tfd.data.from_arrays."
)
_SHUFFLE = (
    "fit shuffles arrays in its own order, which differs from the order of plain Keras. Pass"
    " shuffle=False to compare; train with either order."
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


def probable_causes(
    trainings: Trainings, strategy: tf.distribute.Strategy, result: Verification, plain: Results
) -> Iterator[str]:
    """Yields the causes that experiments find, with their remedies.

    Args:
        result: the comparison, which is not equal.
        plain: the results of plain Keras.
    """

    def unequal(found: Results) -> list[str]:
        differences = relative_differences(found, plain)
        return [name for name, value in differences.items() if value > result.allowed(name)]

    train = functools.partial(trainings.train, shuffle=False)
    names = [name for name in result.unequal if not name.startswith("data ")]
    if trainings.order_changes:
        yield _ORDER
    if trainings.shuffles:
        yield _SHUFFLE
        plain = train()
        names = unequal(train(strategy))
    if not names:
        return
    if unequal(train()):
        yield _NOT_REPRODUCIBLE
        return
    if unequal(train(numpy_seed=7331)):
        yield _NUMPY
        return
    layers = batch_normalization_layers(trainings.new_model())
    if any(not layer.synchronized for layer in layers):
        remaining = unequal(train(strategy, synchronize_batch_norm=True))
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
