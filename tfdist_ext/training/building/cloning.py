"""Clones Keras objects from their configs, with the live functions and classes they use.

A config has only the name of a user's function, or a lambda as bytes. Both objects live in this
process, so the clone takes the functions of the original.
"""

from __future__ import annotations

import contextlib
import difflib
import inspect
import random
import tempfile
import types
import warnings
from collections.abc import Iterable, Iterator
from typing import TypeAlias

import keras

from tfdist_ext.errors import TrainingError
from tfdist_ext.training import _keras_private as kp

__all__ = [
    "cannot_be_copied",
    "clone_from_config",
    "clone_model",
    "copy_flags_and_assets",
    "custom_objects_of",
    "truncate_message",
]


_OF_KERAS = {"name", "trainable", "dtype"}

_NAMED_BY_CLASS = (
    keras.losses.Loss,
    keras.metrics.Metric,
    keras.optimizers.Optimizer,
    keras.optimizers.schedules.LearningRateSchedule,
)

# Objects that Keras makes from a config.
Configured: TypeAlias = keras.optimizers.Optimizer | keras.metrics.Metric | keras.losses.Loss


def clone_from_config(thing: Configured) -> Configured:
    """Returns a clone of an optimizer or a metric, without its state.

    Raises:
        TrainingError: its config is missing or incomplete.
    """
    try:
        with custom_objects_of([thing]):
            return type(thing).from_config(thing.get_config())
    except (TypeError, ValueError, NotImplementedError, RuntimeError) as error:
        raise cannot_be_copied(thing, truncate_message(error)) from error


def clone_model(model: keras.Model) -> keras.Model:
    """Returns the same model, not compiled, with its own weights.

    Raises:
        TrainingError: the model cannot be copied from its config.
    """
    try:
        with custom_objects_of(kp.flat_layers(model)), _without_side_effects(model):
            if kp.is_graph_of_layers(model) and _is_of_keras(type(model).get_config):
                copy = keras.models.clone_model(model, clone_function=_layer_again, recursive=True)
            else:
                copy = _layer_again(model)
            _build_as(model, copy)
            _enable_lora_as(model, copy)
    except (AttributeError, TypeError, ValueError, NotImplementedError, RuntimeError) as error:
        raise cannot_be_copied(model, truncate_message(error)) from error
    return copy


def cannot_be_copied(thing: Configured | keras.Model, reason: str) -> TrainingError:
    """Returns the error for an object that Keras cannot create again from its config."""
    return TrainingError(
        f"{type(thing).__name__} cannot be copied into the strategy's scope: {reason} Pass a"
        " function that builds and compiles the model: distribute(build, strategy). Or give the"
        " class what Keras needs to load it: get_config(), and for its own compile()"
        " get_compile_config() and compile_from_config()."
    )


@contextlib.contextmanager
def _without_side_effects(model: keras.Model) -> Iterator[None]:
    """Scope of a copy, in which Keras neither compiles it nor draws from Python's generator.

    `recompile` takes the live compile settings.
    """
    state, compiled = random.getstate(), model.compiled
    model.compiled = False
    try:
        yield
    finally:
        model.compiled = compiled
        random.setstate(state)


def copy_flags_and_assets(model: keras.Model, copy: keras.Model) -> None:
    """Copies state outside of weights: trainable flags, vocabularies, seeds of random layers."""
    for old, new in _paired_layers(model, copy):
        new.trainable = old.trainable  # parents come first: they set their children's too
        for name, value in vars(old).items():
            mine = vars(new).get(name)
            if isinstance(value, keras.random.SeedGenerator) and type(mine) is type(value):
                mine.state.assign(value.state.numpy())
        if hasattr(old, "save_assets"):
            with tempfile.TemporaryDirectory() as folder:
                old.save_assets(folder)
                new.load_assets(folder)
    # Single weights may be frozen in a layer that is not: by LoRA, or by the user.
    for before, after in zip(model.weights, copy.weights, strict=False):
        after.trainable = before.trainable


def _paired_layers(model: keras.Model, copy: keras.Model) -> list[tuple[keras.Layer, keras.Layer]]:
    """Returns each layer and its copy, parents first.

    Layers without a copy are left out: the model has made them in its first call, as a tokenizer
    makes its packer. They have no weights, or the numbers of weights would differ.
    """
    old, new = kp.flat_layers(model), kp.flat_layers(copy)
    matcher = difflib.SequenceMatcher(None, [*map(type, old)], [*map(type, new)], False)
    blocks = matcher.get_matching_blocks()
    return [(old[a + i], new[b + i]) for a, b, size in blocks for i in range(size)]


def truncate_message(error: Exception) -> str:
    """Returns the beginning of a message of Keras, which can be pages long."""
    words = " ".join(str(error).split())
    return words if len(words) <= 200 else words[:200] + " ..."


def _build_as(model: keras.Model, copy: keras.Model) -> None:
    """Builds each layer for the shapes that the original was built for."""
    for old, new in reversed(_paired_layers(model, copy)):  # inner layers first
        if old.built and not new.built and not isinstance(new, keras.Model):
            new.build_from_config(old.get_build_config() or {})
    if model.built and not copy.built:
        if len(copy.weights) == len(model.weights):
            copy.built = True
        else:
            copy.build_from_config(model.get_build_config())


def _enable_lora_as(model: keras.Model, copy: keras.Model) -> None:
    """Enables LoRA, which is not in the config of a model that makes the layers itself."""
    for old, new in _paired_layers(model, copy):
        if getattr(old, "lora_enabled", False) and not getattr(new, "lora_enabled", True):
            new.enable_lora(old.lora_rank, lora_alpha=old.lora_alpha)


def _layer_again(layer: keras.Layer | keras.Operation) -> keras.Layer | keras.Operation:
    if not isinstance(layer, keras.layers.Layer):  # an operation of a functional model: h + 1
        return type(layer).from_config(layer.get_config())
    config = layer.get_config()
    parameters = inspect.signature(type(layer).__init__).parameters
    if isinstance(layer, keras.Model) and type(layer).get_config is keras.Model.get_config:
        # Keras keeps the arguments of layers. The config of such a model has the defaults instead.
        unknown = [
            name
            for name, p in parameters.items()
            if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and name not in {"self", *_OF_KERAS}
        ]
        if unknown and not kp.is_graph_of_layers(layer):
            raise NotImplementedError(
                f"{type(layer).__name__} has no get_config(), so the value of its argument"
                f" {unknown[0]!r} is not known."
            )
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        # Keras adds these to the config of each class, whether its __init__ takes them or not.
        for name in _OF_KERAS - set(parameters):
            config.pop(name, None)
    if not isinstance(layer, keras.layers.Lambda):  # which takes its function from bytes only
        config.update({k: v for k, v in _own_functions(layer).items() if k in config})
    new = type(layer).from_config(config)
    for old_part, new_part in zip(kp.flat_layers(layer), kp.flat_layers(new), strict=False):
        if type(old_part) is type(new_part):
            for name, value in _own_functions(old_part).items():
                setattr(new_part, name, value)
    return new


@contextlib.contextmanager
def custom_objects_of(things: Iterable[object]) -> Iterator[None]:
    """Scope in which the classes and functions that `things` use are found by name."""
    objects: dict[str, type | types.FunctionType] = {}
    for thing in things:
        objects[type(thing).__name__] = type(thing)
        for value in vars(thing).values():
            if isinstance(value, _NAMED_BY_CLASS):
                objects[type(value).__name__] = type(value)
        objects.update({value.__name__: value for value in _own_functions(thing).values()})
    own = {name: value for name, value in objects.items() if not _is_of_keras(value)}
    with keras.saving.custom_object_scope(own), kp.trusted(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The object being serialized includes a `lambda`")
        yield


def _own_functions(thing: object) -> dict[str, types.FunctionType]:
    """Returns attribute -> function of the user; without the methods, which Keras wraps."""
    return {
        name: value
        for name, value in vars(thing).items()
        if inspect.isfunction(value) and not _is_of_keras(value) and not hasattr(type(thing), name)
    }


def _is_of_keras(value: type | types.FunctionType) -> bool:
    return str(value.__module__).startswith("keras.")
