"""Finds out why a model trains differently on a strategy, for `tfd.verify`.

Each cause has an experiment: the same training with another setting, or the loss of plain Keras on
other batches.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist_ext.data.rows import batch_size_of, rows_between
from tfdist_ext.training.building.build import batch_normalization_layers
from tfdist_ext.training.protocols import Structure
from tfdist_ext.training.verification.result import (
    Cause,
    Results,
    Verification,
    relative_differences,
)
from tfdist_ext.training.verification.trainings import Trainings

__all__ = ["probable_causes"]

_ORDER = Cause(
    "The data comes in another order at each reading.",
    0,
    "Give shuffle() a seed and reshuffle_each_iteration=False, or use tfd.data.from_arrays.",
)
_SHUFFLE = Cause(
    "fit shuffles arrays in its own order, which differs from the order of plain Keras.",
    0,
    "Pass shuffle=False to compare; train with either order.",
)
_NOT_REPRODUCIBLE = Cause(
    "Plain Keras does not repeat its own numbers with the same seeds.",
    0,
    "Seed all random numbers (keras.utils.set_random_seed), then verify again.",
)
_NUMPY = Cause(
    "The model draws random numbers from np.random, which replicas do not share.",
    6,
    "Draw from keras.random with a keras.random.SeedGenerator.",
)
_BATCH_NORM = Cause(
    "BatchNormalization normalizes the rows of each replica by themselves.",
    5,
    "Pass synchronize_batch_norm=True to tfd.distribute to normalize over the global batch.",
)
_SUM = Cause(
    "The loss is a sum over rows, or a sum divided by a constant such as the batch size.",
    2,
    "Return one loss per row, or take tf.reduce_mean over the rows.",
)
_RATIO = Cause(
    "The loss is a ratio of two sums over rows, as a masked mean is. Each replica divides its own"
    " sums.",
    2,
    "Call tfd.all_rows on the losses and the mask first, or return one loss per row with a"
    " sample weight.",
)
_PAIRS = Cause(
    "The loss compares rows with each other, as in-batch negatives do. Each replica sees only its"
    " own rows.",
    7,
    "Call tfd.all_rows on the features before they are compared.",
)
_OWN_VARIABLE = Cause(
    "{} is a tf.Variable of your own that depends on the rows. Each replica writes its own copy.",
    5,
    "Write the same value on all replicas: compute it from tfd.all_rows. Or use a Keras metric.",
)
_STATE = Cause(
    "A step writes sums or counts of its rows to {}. The copies of the replicas are averaged.",
    5,
    "Compute the value from tfd.all_rows, or write a mean over the rows.",
)
_METRIC = Cause(
    "The metric {} is not made of sums over rows: it averages a number of each batch.",
    4,
    "Add up numerator and denominator in two variables, and divide in result().",
)
_UNKNOWN = Cause(
    "No experiment found the cause.",
    0,
    "Read the list of what the rules do not cover, in docs/exactness.md.",
)


def probable_causes(trainings: Trainings, result: Verification, plain: Results) -> Iterator[Cause]:
    """Yields the causes that experiments find.

    Args:
        result: the comparison, which is not equal.
        plain: the results of plain Keras.
    """

    def differ(found: Results, wanted: Results) -> list[str]:
        differences = relative_differences(found, wanted)
        return [name for name, value in differences.items() if value > result.allowed(name)]

    left = [name for name in result.unequal if not name.startswith("data ")]
    if len(left) < len(result.unequal):
        yield _ORDER
    if trainings.shuffles:
        plain = trainings.plain(shuffle=False)
        left = differ(trainings.distributed(shuffle=False), plain)
        yield _SHUFFLE
    if not left:
        return
    kept = {"shuffle": False} if trainings.shuffles else {}
    if differ(trainings.plain(**kept), plain):
        yield _NOT_REPRODUCIBLE
        return
    if differ(trainings.plain(numpy_seed=7331, **kept), plain):
        yield _NUMPY
        return
    model = trainings.new_model()
    if any(not layer.synchronized for layer in batch_normalization_layers(model)):
        after = differ(trainings.distributed(synchronize_batch_norm=True, **kept), plain)
        if len(after) < len(left):
            yield _BATCH_NORM
            left = after
    if not left:
        return
    yield from _causes_by_place(left, trainings, model)


def _causes_by_place(
    unequal: list[str], trainings: Trainings, model: keras.Model
) -> Iterator[Cause]:
    """Yields causes by what differs: trained weights, other variables, or only logs."""
    named = {
        kind: [name.removeprefix(f"{kind} ") for name in unequal if name.startswith(f"{kind} ")]
        for kind in ("weight", "variable", "log")
    }
    found = False
    if named["weight"] and (cause := _cause_in_loss(trainings, model)) is not None:
        found = True
        yield cause
    for name in named["variable"]:
        found = True
        template = _OWN_VARIABLE if "(tf.Variable)" in name else _STATE
        yield _about(template, name)
    metrics = [name for name in named["log"] if not name.endswith("loss")]
    if not named["weight"] and metrics:
        found = True
        yield _about(_METRIC, ", ".join(metrics))
    if not found:
        yield _UNKNOWN


def _about(template: Cause, name: str) -> Cause:
    return Cause(template.what.format(name), template.rule, template.remedy)


def _cause_in_loss(trainings: Trainings, model: keras.Model) -> Cause | None:
    """Tells the kind of a loss by its value for a batch, its halves, and its rows twice."""
    batch = trainings.batches[0]
    rows = int(batch_size_of(batch))
    if rows < 2:
        return None
    half = rows // 2
    with contextlib.suppress(Exception):  # a step that wants other batches
        loss = _Losses(model, batch)
        whole, doubled = loss.of(batch), loss.of(tf.nest.map_structure(_twice, batch))
        first = loss.of(rows_between(batch, 0, half))
        second = loss.of(rows_between(batch, half, rows))
        mean = (half * first + (rows - half) * second) / rows
        if not _close(doubled, whole):
            return _SUM if _close(doubled, 2 * whole) else _PAIRS
        if not _close(mean, whole):
            return _RATIO
    return None


def _twice(part: tf.Tensor | None) -> tf.Tensor | None:
    return None if part is None else tf.concat([part, part], axis=0)


class _Losses:
    """The loss of plain Keras for one batch, from the same weights each time."""

    def __init__(self, model: keras.Model, batch: Structure):
        self._model = model
        # Keras's own test_step computes the loss without dropout.
        own = type(model).train_step is not keras.Model.train_step
        self._method = model.train_on_batch if own else model.test_on_batch
        self._call(batch)  # the variables are made
        self._start = [variable.numpy() for variable in model.variables]

    def of(self, batch: Structure) -> float:
        for variable, value in zip(self._model.variables, self._start, strict=True):
            variable.assign(value)
        self._model.reset_metrics()
        logs = self._call(batch)
        losses = [name for name in logs if name.endswith("loss")]
        return float(logs["loss" if "loss" in logs else losses[0]])

    def _call(self, batch: Structure) -> dict[str, Any]:
        x, y, weight = keras.utils.unpack_x_y_sample_weight(batch)
        if y is None and weight is None:
            return self._method(x, return_dict=True)
        return self._method(x, y, sample_weight=weight, return_dict=True)


def _close(a: float, b: float) -> bool:
    return bool(np.isclose(a, b, rtol=1e-3, atol=1e-6))
