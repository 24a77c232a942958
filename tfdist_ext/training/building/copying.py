"""Copies Keras models: layers, weights, compile settings and the state of optimizers.

A model is copied layer by layer, from configs. A config has only the name of a user's function, or
a lambda as bytes. Both models live in this process, so the copy takes the functions of the
original.
"""

from __future__ import annotations

import contextlib
import difflib
import inspect
import random
import tempfile
import textwrap
import types
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import keras

from tfdist_ext.errors import TrainingError
from tfdist_ext.training._keras_private import (
    compile_arguments,
    flat_layers,
    is_graph_of_layers,
    trained_by,
    trusted,
)
from tfdist_ext.training.state import assign_whole, own_variables, whole_value
from tfdist_ext.training.variables import attributes_of, parts_of

__all__ = ["clone_model", "compile_as", "copy_state"]

# Objects that Keras makes from a config.
_Configured: TypeAlias = keras.optimizers.Optimizer | keras.metrics.Metric | keras.Model

# Keras adds these to the config of each layer, whether its __init__ takes them or not.
_OF_KERAS = {"name", "trainable", "dtype"}

_NAMED_BY_CLASS = (
    keras.losses.Loss,
    keras.metrics.Metric,
    keras.optimizers.Optimizer,
    keras.optimizers.schedules.LearningRateSchedule,
)


def compile_as(source: keras.Model, target: keras.Model) -> None:
    """Compiles `target` as `source` is, and copies the state of the optimizers.

    A class with `compile_from_config` is compiled by that method, as Keras does when it loads a
    model. Other classes are compiled with the arguments that the model keeps as attributes of the
    same name.

    Raises:
        TrainingError: a compile() whose arguments are not known, an optimizer or a metric that
            cannot be cloned, or an optimizer that was built for other variables.
    """
    before = attributes_of(source, keras.optimizers.Optimizer)
    if type(source).compile_from_config is not keras.Model.compile_from_config:
        config = source.get_compile_config()
        with _custom_objects_of([source]):
            target.compile_from_config(config)
    else:
        arguments = _compile_arguments(source)
        with _errors_of(source):  # a compile() may give Keras other arguments than it got
            target.compile(**keras.tree.map_structure(_without_state, arguments))
        if type(source).compile is not keras.Model.compile:  # it may keep something else
            for name, value in _compile_arguments(target).items():
                if _description(value) != _description(arguments[name]):
                    raise _unknown_argument(source, name)
    after = attributes_of(target, keras.optimizers.Optimizer)
    for name, old in before.items():
        if old.built:
            _copy_optimizer_state(old, after.get(name), source, target)


def _without_state(argument: Any) -> Any:
    """Clones an argument of compile that has variables, which two models must not share."""
    if not hasattr(argument, "variables") or not hasattr(argument, "get_config"):
        return argument
    with _errors_of(argument), _custom_objects_of([argument]):
        return type(argument).from_config(argument.get_config())


def _compile_arguments(model: keras.Model) -> dict[str, Any]:
    """Returns the arguments of compile(): those that Keras keeps, and attributes of their names."""
    of_keras = compile_arguments(model)
    _, *parameters = inspect.signature(type(model).compile).parameters.values()
    names = [each.name for each in parameters if each.kind is not each.VAR_KEYWORD]
    if len(names) < len(parameters):  # the keywords go to Keras
        names += of_keras
    known = {**vars(model), **of_keras}
    required = {each.name for each in parameters if each.default is each.empty}
    for name in names:
        if name not in known or (name in required and known[name] is None):
            raise _unknown_argument(model, name)
    return {name: known[name] for name in names}


def _description(argument: Any) -> str:
    """Returns a text that is equal for two equal arguments of compile(); of objects, the class."""
    parts = keras.tree.flatten(argument)
    return repr([type(part) if hasattr(part, "get_config") else part for part in parts])


def _unknown_argument(model: keras.Model, name: str) -> TrainingError:
    return _cannot_be_copied(model, f"the argument {name!r} of its compile() is unknown.")


def _copy_optimizer_state(
    old: keras.optimizers.Optimizer,
    new: keras.optimizers.Optimizer | None,
    source: keras.Model,
    target: keras.Model,
) -> None:
    """Builds an optimizer as an old one, and copies the state. Frozen weights keep theirs, too."""
    copies = {id(weight): copy for weight, copy in zip(source.weights, target.weights, strict=True)}
    weights = [copies[id(each)] for each in trained_by(old) if id(each) in copies]
    if new is not None:
        new.build(weights)
        if (parts := parts_of(new)) is not None:
            parts.initial = [value.numpy() for value in old.variables]  # for when it is built
            return
    if (
        new is None
        or [*map(id, trained_by(new))] != [*map(id, weights)]
        or len(new.variables) != len(old.variables)
    ):
        raise _cannot_be_copied(
            old,
            "it must be built for weights of the model, and compile_from_config() must create the"
            " same optimizer without building it.",
        )
    for variable, value in zip(new.variables, old.variables, strict=True):
        variable.assign(value.numpy())


def _cannot_be_copied(thing: _Configured, reason: str) -> TrainingError:
    """Returns the error for an object that Keras cannot create again from its config."""
    return TrainingError(
        f"{type(thing).__name__} cannot be copied: {reason} Pass a function that builds and"
        " compiles the model: distribute(build, strategy). Or add the methods that Keras needs to"
        " load it: get_config(), and for a custom compile() get_compile_config() and"
        " compile_from_config()."
    )


@contextlib.contextmanager
def _errors_of(thing: _Configured) -> Iterator[None]:
    """Scope in which an error means that Keras cannot make a thing from its config."""
    try:
        yield
    except (AttributeError, TypeError, ValueError, NotImplementedError, RuntimeError) as error:
        raise _cannot_be_copied(thing, textwrap.shorten(str(error), 200)) from error


def clone_model(model: keras.Model) -> keras.Model:
    """Returns the same model, not compiled, with its own weights.

    Raises:
        TrainingError: the model cannot be copied from its config.
    """
    # Keras draws seeds from Python's generator, and compiles the copy of a compiled model.
    state, compiled = random.getstate(), model.compiled
    model.compiled = False
    try:
        with _errors_of(model), _custom_objects_of(flat_layers(model)):
            if is_graph_of_layers(model) and _is_of_keras(type(model).get_config):
                copy = keras.models.clone_model(model, clone_function=_layer_again, recursive=True)
            else:
                copy = _layer_again(model)
            if type(copy) is not type(model):  # Keras clones a subclass of Sequential so
                raise _cannot_be_copied(model, f"Keras makes a {type(copy).__name__} of it.")
            _build_as(model, copy)
    finally:
        model.compiled = compiled
        random.setstate(state)
    return copy


def _layer_again(layer: keras.Layer | keras.Operation) -> keras.Layer | keras.Operation:
    if not isinstance(layer, keras.layers.Layer):  # an operation of a functional model: h + 1
        return type(layer).from_config(layer.get_config())
    config = layer.get_config()
    parameters = inspect.signature(type(layer).__init__).parameters
    kinds = {each.kind for each in parameters.values()}
    has_own_config = type(layer).get_config is not keras.Model.get_config
    if isinstance(layer, keras.Model) and not (has_own_config or is_graph_of_layers(layer)):
        # Keras keeps the arguments of layers. The config of such a model has the defaults instead.
        variadic = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
        named = {name for name, each in parameters.items() if each.kind not in variadic}
        if unknown := sorted(named - {"self", *_OF_KERAS}):
            raise NotImplementedError(
                f"{type(layer).__name__} has no get_config(), so the value of its argument"
                f" {unknown[0]!r} is unknown."
            )
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        config = {k: v for k, v in config.items() if k in parameters or k not in _OF_KERAS}
    if not isinstance(layer, keras.layers.Lambda):  # which takes its function from bytes only
        config.update({k: v for k, v in _own_functions(layer).items() if k in config})
    new = type(layer).from_config(config)
    for old_part, new_part in zip(flat_layers(layer), flat_layers(new), strict=False):
        if type(old_part) is type(new_part):
            for name, value in _own_functions(old_part).items():
                setattr(new_part, name, value)
    return new


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
    for old, new in _paired_layers(model, copy):
        # The config of a model that makes its layers itself does not have LoRA.
        if getattr(old, "lora_enabled", False) and not getattr(new, "lora_enabled", True):
            new.enable_lora(old.lora_rank, lora_alpha=old.lora_alpha)


def copy_state(model: keras.Model, copy: keras.Model) -> None:
    """Copies weights, trainable flags, vocabularies, and seeds of random layers.

    Raises:
        TrainingError: the copy has other weights.
    """
    if [weight.shape for weight in copy.weights] != [weight.shape for weight in model.weights]:
        raise _cannot_be_copied(model, "the copy has weights of different shapes.")
    for old, new in _paired_layers(model, copy):
        new.trainable = old.trainable  # parents come first: they set their children's too
        copies = attributes_of(new, keras.random.SeedGenerator)
        for name, value in attributes_of(old, keras.random.SeedGenerator).items():
            if name in copies:
                copies[name].state.assign(value.state.numpy())
        own = own_variables(new)
        for name, variable in own_variables(old).items():
            if name in own:
                assign_whole(own[name], whole_value(variable))
        if hasattr(old, "save_assets"):
            with tempfile.TemporaryDirectory() as folder:
                old.save_assets(folder)
                new.load_assets(folder)
    for old, new in zip(model.weights, copy.weights, strict=True):
        assign_whole(new, whole_value(old))
        new.trainable = old.trainable  # LoRA, or the user, may freeze single weights


def _paired_layers(model: keras.Model, copy: keras.Model) -> list[tuple[keras.Layer, keras.Layer]]:
    """Returns each layer and its copy, parents first.

    Layers without a copy are left out: the model has made them in its first call, as a tokenizer
    makes its packer. They have no weights, or the numbers of weights would differ.
    """
    old, new = flat_layers(model), flat_layers(copy)
    matcher = difflib.SequenceMatcher(None, [*map(type, old)], [*map(type, new)], False)
    blocks = matcher.get_matching_blocks()
    return [(old[a + i], new[b + i]) for a, b, size in blocks for i in range(size)]


@contextlib.contextmanager
def _custom_objects_of(things: Iterable[object]) -> Iterator[None]:
    """Scope in which the classes and functions that `things` use are found by name."""
    objects: dict[str, type | types.FunctionType] = {}
    for thing in things:
        objects[type(thing).__name__] = type(thing)
        for value in vars(thing).values():
            if isinstance(value, _NAMED_BY_CLASS):
                objects[type(value).__name__] = type(value)
        objects.update({value.__name__: value for value in _own_functions(thing).values()})
    own = {name: value for name, value in objects.items() if not _is_of_keras(value)}
    with keras.saving.custom_object_scope(own), trusted(), warnings.catch_warnings():
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
