"""That a step went through the functions that are replaced for it.

A release of Keras may compute something in another way, past a function that `replaced.py` has put
in place. The step would then train on other numbers, without a word. So what a step must have
called is looked at when it is traced, or first runs eagerly: what follows from the model where the
step is Keras's own, and what follows from what the step wrote where it is a user's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Set
from typing import NamedTuple

import keras
import tensorflow as tf

from tfdist_ext.errors import TrainingError
from tfdist_ext.training import _keras_private as kp
from tfdist_ext.training.optimizers import optimizers_of

__all__ = [
    "StepRecord",
    "check_lookups",
    "check_passed",
    "has_own_apply",
    "not_called",
    "requiring",
    "uses_keras_step",
]

_APPLIES = ("apply", "apply_gradients")


def uses_keras_step(model: keras.Model, kind: str) -> bool:
    """Whether a "train" or "test" step is the one that Keras's own models have."""
    step = getattr(model, f"{kind}_step")
    return getattr(step, "__func__", None) is getattr(keras.Model, f"{kind}_step")


def has_own_apply(optimizer: object) -> bool:
    """Whether an optimizer has an `apply` of the object alone, which may do anything."""
    return not vars(optimizer).keys().isdisjoint(_APPLIES)


class StepRecord(NamedTuple):
    """What one replica's step has done, by which it is told what it must have called.

    Attributes:
        called: keys of `REPLACED`.
        written: ids of the Keras variables that it wrote, other than those of metrics, and other
            than what an optimizer's `apply` wrote.
        metrics: ids of the metrics' variables that it wrote.
        read_whole: ids of the variables in shards that it read as one tensor.
        has_losses: layers gave something to add_loss, or have weights that are regularized.
    """

    called: Set[str]
    written: Set[int] = frozenset()
    metrics: Set[int] = frozenset()
    read_whole: Set[int] = frozenset()
    has_losses: bool = False


def check_passed(model: keras.Model, kind: str, step: StepRecord) -> None:
    """Check what one replica's "train", "test" or "predict" step has called.

    Raises:
        TrainingError: a function that is replaced for it was not called.
    """
    for keys in _expected(model, kind, step):
        if not step.called & set(keys):
            raise not_called(keys[0])


def check_lookups(model: keras.Model, step: StepRecord) -> None:
    """Check that rows of tables in shards were gathered where they are.

    Raises:
        TrainingError: a whole table was read instead.
    """
    if "take" in step.called or not step.read_whole:
        return
    for layer in kp.flat_layers(model):
        if isinstance(layer, keras.layers.Embedding) and id(layer.embeddings) in step.read_whole:
            raise not_called("take")


def not_called(key: str) -> TrainingError:
    """The error of a step that did not call a function which is replaced for it."""
    functions = [replaced for replaced in kp.REPLACED if replaced.key == key]
    names = " or ".join(str(replaced) for replaced in functions)
    return TrainingError(
        f"the step must call {names}, where its numbers become those of the global batch"
        f" ({functions[0].why}), and Keras {keras.__version__} with TensorFlow {tf.__version__} did"
        " not. This release takes another way, and the training would be wrong: install versions"
        " that docs/compatibility.md lists as tested, or a newer tfdist_ext."
    )


@contextlib.contextmanager
def requiring(key: str, called: Set[str]) -> Iterator[None]:
    """Scope in which a KeyError means that the function of a key was not called."""
    try:
        yield
    except KeyError as error:
        if key in called:
            raise
        raise not_called(key) from error


def _expected(model: keras.Model, kind: str, step: StepRecord) -> Iterator[tuple[str, ...]]:
    """Keys of which the step must have called one at least."""
    if kind != "predict" and uses_keras_step(model, kind):
        yield from _of_keras_step(model, kind, step)
    if kind == "train":
        yield from _of_optimizers(model, step)
    for metric in model.metrics:
        inherits = type(metric).update_state is keras.metrics.Mean.update_state
        if inherits and any(id(variable) in step.metrics for variable in metric.variables):
            yield ("update_mean",)
    for layer in kp.flat_layers(model):
        is_normal = isinstance(layer, keras.layers.BatchNormalization)
        if is_normal and layer.synchronized and id(layer.moving_mean) in step.written:
            yield ("moments_of_layer",)


def _of_keras_step(model: keras.Model, kind: str, step: StepRecord) -> Iterator[tuple[str, ...]]:
    yield ("clear_losses",)
    yield ("update_mean",)  # of the tracker of the loss
    if type(model).compute_loss is keras.Model.compute_loss:
        if model.loss is not None:
            yield ("replicas",)
            if any(map(_is_reduced, keras.tree.flatten(model.loss))):
                yield ("loss",)
                yield ("reduce_loss",)
        if step.has_losses:
            yield ("added_loss",)
    if kind == "train" and model.trainable_variables:
        yield ("gradient",)
        yield _APPLIES


def _is_reduced(loss: object) -> bool:
    """Whether one of the losses given to `compile` is called as Keras's own are."""
    if isinstance(loss, keras.losses.Loss):
        return type(loss).__call__ is keras.losses.Loss.__call__
    return loss is not None


def _of_optimizers(model: keras.Model, step: StepRecord) -> Iterator[tuple[str, ...]]:
    """An optimizer that counted a step has applied gradients.

    A step that assigns weights by hand may count by hand, too.
    """
    by_hand = any(id(weight) in step.written for weight in model.trainable_weights)
    if "gradient" not in step.called or by_hand:
        return
    for optimizer in optimizers_of(model).values():
        if id(kp.step_variables(optimizer)[0]) in step.written:
            yield _APPLIES
