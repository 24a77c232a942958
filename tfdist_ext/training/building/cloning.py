"""Copies Keras objects by their configs, with the classes and functions that they use.

A model can be copied if Keras could save and load it. A config has only the names of the user's
classes and functions. They are found in the objects that are copied.
"""

from __future__ import annotations

import contextlib
import difflib
import inspect
import tempfile
import types
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

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

# Keras adds these to the config of each layer, whether its __init__ takes them or not.
_OF_KERAS = {"name", "trainable", "dtype"}

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
        with custom_objects_of(kp.flat_layers(model)):
            copy = type(model).from_config(_config_of(model))
            _build_as(model, copy)
            _enable_lora_as(model, copy)
    except (AttributeError, TypeError, ValueError, NotImplementedError, RuntimeError) as error:
        raise cannot_be_copied(model, truncate_message(error)) from error
    return copy


def cannot_be_copied(thing: Configured | keras.Model, reason: str) -> TrainingError:
    """Returns the error for an object whose config is missing or incomplete."""
    return TrainingError(
        f"{type(thing).__name__} cannot be copied into the strategy's scope: {reason} Pass a"
        " function that builds and compiles the model: distribute(build, strategy). Or give the"
        " class what Keras needs to load it: get_config(), and for its own compile()"
        " get_compile_config() and compile_from_config()."
    )


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


def _config_of(model: keras.Model) -> dict[str, Any]:
    config = model.get_config()
    init = inspect.getfullargspec(type(model).__init__)
    names = {*init.args, *init.kwonlyargs}
    unknown = sorted(names - {"self", *_OF_KERAS})
    # Keras keeps the arguments of layers, but not those of models.
    if unknown and "layers" not in config and _is_of_keras(type(model).get_config):
        raise NotImplementedError(
            f"the class has no get_config(), so the value of its argument {unknown[0]!r} is not"
            " known."
        )
    left_out = set() if init.varkw else _OF_KERAS - names
    return {name: value for name, value in config.items() if name not in left_out}


@contextlib.contextmanager
def custom_objects_of(things: Iterable[object]) -> Iterator[None]:
    """Scope in which the classes and functions that `things` use are found by name."""
    objects: dict[str, type | types.FunctionType] = {}
    for thing in things:
        for each in (thing, *vars(thing).values()):
            named = each if inspect.isfunction(each) else type(each)
            if not _is_of_keras(named):
                objects[named.__name__] = named
    with keras.saving.custom_object_scope(objects), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The object being serialized includes a `lambda`")
        yield


def _is_of_keras(value: type | types.FunctionType) -> bool:
    return str(value.__module__).startswith(("keras.", "builtins"))
