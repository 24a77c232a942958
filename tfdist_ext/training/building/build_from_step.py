"""Makes the variables of models that only their custom step can call, by tracing the step once.

A GAN or a VAE may have no `call`, or a `call` that does not take what the data begins with. Plain
Keras makes missing variables while it traces the first step. On a strategy all variables must exist
before that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator

import keras
import tensorflow as tf

from tfdist_ext.errors import TrainingError
from tfdist_ext.training import _keras_private as kp
from tfdist_ext.training.building.cloning import truncate_message
from tfdist_ext.training.protocols import Structure
from tfdist_ext.training.steps.replaced import functions_in_place, step_targets, substitutes
from tfdist_ext.training.variables import default_strategy_scope

__all__ = ["build_from_step", "recording_updates"]


def build_from_step(model: keras.Model, kind: str, batch: Structure) -> None:
    """Makes the variables of layers and optimizers that a custom step uses, in the open scope.

    An optimizer is built for the variables that the step applies it to first, as in Keras.

    Args:
        kind: "train", "test" or "predict".
        batch: a structure of `keras.KerasTensor`, one global batch.

    Raises:
        TrainingError: the step cannot be traced while layers have no variables yet.
    """
    step = getattr(model, f"{kind}_step")
    step = getattr(step, "python_function", step)  # of a tf.function
    applied: dict[int, tuple[keras.optimizers.Optimizer, list[keras.Variable]]] = {}

    def note(optimizer: keras.optimizers.Optimizer, variables: list[keras.Variable]) -> None:
        applied.setdefault(id(optimizer), (optimizer, variables))

    def tried(batch: Structure) -> Structure:
        # Losses that layers add are discarded with the scope.
        losses = keras.StatelessScope(collect_losses=True)
        with default_strategy_scope(), recording_updates(note), losses:
            return step(batch)

    failure: Exception | None = None
    try:
        kp.call_symbolically(tried, batch)
    except Exception as error:
        failure = error
    inner = [layer for layer in kp.flat_layers(model) if layer is not model]
    missing = [layer.name for layer in inner if not layer.built]
    if failure is not None and missing:
        raise TrainingError(
            f"{type(model).__name__} has layers without variables yet ({', '.join(missing)}), and"
            f" its {kind}_step, tried on a batch of {batch!r} to make them, fails:"
            f" {truncate_message(failure)} Build the layers in the function given to distribute():"
            " begin models with keras.Input(shape), or call build(shape)."
        ) from failure
    for optimizer, variables in applied.values():
        if not optimizer.built:
            optimizer.build(variables)
    compiled = None if kind == "predict" else model.optimizer
    if isinstance(compiled, keras.optimizers.Optimizer) and not compiled.built:
        # The step does not use it. Keras's fit builds it too under a strategy.
        compiled.build(model.trainable_variables)
    model.built = True


@contextlib.contextmanager
def recording_updates(
    note: Callable[[keras.optimizers.Optimizer, list[keras.Variable]], None],
) -> Iterator[None]:
    """Scope in which gradients are zeros, and optimizers only call `note(optimizer, variables)`.

    Variables that are distributed, or not made yet, have no gradient outside of a replica's
    context.
    """

    def apply(
        original: object,
        optimizer: keras.optimizers.Optimizer,
        grads: object,
        trainable_variables: Iterable[keras.Variable] | None = None,
    ) -> None:
        if trainable_variables is not None:
            note(optimizer, list(trainable_variables))

    def zeros(of: keras.Variable | tf.Variable | tf.Tensor) -> tf.Tensor:
        variable = isinstance(of, keras.Variable | tf.Variable)
        return tf.zeros(of.shape, of.dtype) if variable else tf.zeros_like(of)

    def gradient(
        original: object, tape: object, target: object, sources: Structure, *_: object, **__: object
    ) -> Structure:
        return tf.nest.map_structure(zeros, sources)

    targets = [target for target in step_targets() if target.name in ("apply", "gradient")]
    with functions_in_place(targets), substitutes({"apply": apply, "gradient": gradient}):
        yield
