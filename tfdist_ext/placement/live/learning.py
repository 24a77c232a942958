"""The variables of a model, with its optimizer's slots, learned without allocating them."""

from __future__ import annotations

import contextlib
import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from tfdist_ext.errors import PlacementError
from tfdist_ext.messages import shown
from tfdist_ext.placement.live._keras_private import (
    embeddings_of,
    fresh_names,
    leaving_no_names,
    variable_behind,
)
from tfdist_ext.placement.placement_plan import PlacementPlan
from tfdist_ext.placement.planning import plan
from tfdist_ext.placement.rules import Rules, nearest_paths
from tfdist_ext.placement.sizes import itemsize
from tfdist_ext.placement.specs import VariableSpec
from tfdist_ext.user_frames import filter_traceback

__all__ = ["fresh_names", "is_learning", "learn_specs", "plan_placement"]

_learning: ContextVar[bool] = ContextVar("learning", default=False)

_SMALL = 1024  # numbers of a variable that has values all the same

Model: TypeAlias = keras.Model | Callable[[], keras.Model]
Slots: TypeAlias = dict[int, list[keras.Variable]]  # id of a variable -> what is kept for it


@filter_traceback
def plan_placement(
    model_or_builder: Model,
    *,
    ps: int | None = None,
    devices: Sequence[str] | None = None,
    rules: Rules = (),
    optimizer: str | keras.optimizers.Optimizer | None = None,
    budget: int | str | Sequence[int | str] | None = None,
    loads: Mapping[str, float] | None = None,
) -> PlacementPlan:
    """Where each variable of a model would live, before any of them exists.

    A function that builds the model is called once with variables that have a shape and no values:
    a model of 200 GB is planned on a laptop. Keras's names and random numbers stay as they were.

    Args:
        model_or_builder: a function without arguments that returns a model whose layers are built
            (with keras.Input, or `model.build`); or such a model.
        ps: number of parameter servers; or
        devices: names of the devices of one machine, as ["CPU:0", "GPU:0"].
        rules: as [Rule("users/.*", Sharded(4))], or a table of pattern -> placement or its text.
        optimizer: its slots lie beside the variables; a name or an object, by default the model's.
        budget: the most bytes that each server may hold, as "8GiB"; or one for each.
        loads: path -> traffic of the variable in any one unit, for example lookups in a step. It is
            balanced as well as the bytes are.

    Raises:
        PlacementError: a model that is not built, invalid rules, or variables that do not fit, with
            the smallest budget and number of servers that are enough.
    """
    specs = learn_specs(model_or_builder, optimizer)
    if loads is not None:
        specs = _with_loads(specs, loads)
    return plan(specs, ps, devices=devices, rules=rules, budget=budget)


def learn_specs(
    model_or_builder: Model, optimizer: str | keras.optimizers.Optimizer | None = None
) -> list[VariableSpec]:
    """Every variable of the model, with its slots, in the order in which they are listed.

    Raises:
        PlacementError: no model, one that is not built, a builder that computes with values, or an
            optimizer of no known name.
    """
    with _nothing_allocated():
        if isinstance(model_or_builder, keras.Model):
            model, finished = model_or_builder, True
        else:
            model, finished = _built(model_or_builder), False
        if not model.variables:
            raise PlacementError(
                f"the model must be built, got {model.name!r} without variables: begin it with"
                " keras.Input(shape), or call model.build(shape) in the function."
            )
        chosen = getattr(model, "optimizer", None) if optimizer is None else optimizer
        if chosen is not None and (finished or optimizer is not None):
            chosen = _optimizer(chosen)
        slots = {} if chosen is None else _slots(chosen, model.trainable_variables)
        return _specs(model, chosen, slots)


def is_learning() -> bool:
    """Whether variables are made for their shapes alone."""
    return _learning.get()


@contextlib.contextmanager
def _nothing_allocated() -> Iterator[None]:
    """Scope in which Keras's variables have shapes and no values."""
    state, state_of_numpy = random.getstate(), np.random.get_state()
    token = _learning.set(True)
    try:
        with leaving_no_names(), tf.variable_creator_scope(_without_value):
            yield
    finally:
        _learning.reset(token)
        random.setstate(state)
        np.random.set_state(state_of_numpy)


def _without_value(next_creator: Callable[..., tf.Variable], **kwargs: Any) -> tf.Variable:
    behind = variable_behind(kwargs.get("initial_value"))
    if behind is not None:
        variable, _ = behind
        if math.prod(variable.shape) <= _SMALL:  # some layers reshape such when they are built
            kwargs["initial_value"] = tf.zeros(variable.shape, variable.dtype)
        else:  # Keras looks at its own variable for the shape
            kwargs["initial_value"] = tf.zeros([], variable.dtype)
            kwargs["shape"] = tf.TensorShape(None)
            kwargs["validate_shape"] = False
    return next_creator(**kwargs)


def _built(builder: Callable[[], keras.Model]) -> keras.Model:
    if not callable(builder):
        raise PlacementError(
            "builder must be a keras.Model, or a function without arguments that returns one, got"
            f" {shown(builder)}."
        )
    try:
        model = builder()
    except (ValueError, TypeError, tf.errors.OpError) as error:
        raise PlacementError(
            f"the function that builds the model failed while its variables had no values yet:"
            f" {error} If it computes with them, plan for the finished model instead."
        ) from error
    if not isinstance(model, keras.Model):
        raise PlacementError(
            f"the function that builds the model must return a keras.Model, got {shown(model)}."
        )
    return model


def _optimizer(given: Any) -> keras.optimizers.Optimizer:
    """A new optimizer with the same settings: the given one is not built."""
    try:
        if isinstance(given, keras.optimizers.Optimizer):
            return type(given).from_config(given.get_config())
        return keras.optimizers.get(given)
    except (ValueError, TypeError, NotImplementedError) as error:
        raise PlacementError(
            f"optimizer must be a Keras optimizer, or the name of one, got {shown(given)}: {error}"
        ) from error


def _slots(optimizer: keras.optimizers.Optimizer, variables: Sequence[keras.Variable]) -> Slots:
    """Build the optimizer, and see for which variable it makes which slots."""
    found: Slots = defaultdict(list)
    inner = optimizer
    while getattr(inner, "inner_optimizer", None) is not None:  # loss scaling
        inner = inner.inner_optimizer
    make = inner.add_variable_from_reference

    def watched(reference_variable: keras.Variable, *args: Any, **kwargs: Any) -> keras.Variable:
        slot = make(reference_variable, *args, **kwargs)
        found[id(reference_variable)].append(slot)
        return slot

    inner.add_variable_from_reference = watched
    optimizer.build(variables)
    return found


def _specs(
    model: keras.Model, optimizer: keras.optimizers.Optimizer | None, slots: Slots
) -> list[VariableSpec]:
    trainable = {id(variable) for variable in model.trainable_variables}
    embeddings = {id(variable) for variable in embeddings_of(model)}
    specs = [
        replace(
            _spec(variable, slots.get(id(variable), ()), id(variable) in trainable),
            embedding=id(variable) in embeddings,
        )
        for variable in model.variables
    ]
    # Counters, and slots that the optimizer made without naming their variable.
    named = {id(slot) for of_one in slots.values() for slot in of_one}
    others = [] if optimizer is None else optimizer.variables
    specs += [_spec(variable, (), False) for variable in others if id(variable) not in named]
    # Paths that Keras gave twice, as to the states of two seed generators, are told apart.
    seen: Counter[str] = Counter()
    for index, spec in enumerate(specs):
        seen[spec.path] += 1
        if seen[spec.path] > 1:
            specs[index] = replace(spec, path=f"{spec.path}#{seen[spec.path]}")
    return specs


def _spec(
    variable: keras.Variable, slots: Sequence[keras.Variable], trainable: bool
) -> VariableSpec:
    shape, dtype = tuple(variable.shape), variable.dtype
    others = [slot for slot in slots if (tuple(slot.shape), slot.dtype) != (shape, dtype)]
    return VariableSpec(
        variable.path,
        shape,
        dtype,
        slots=len(slots) - len(others),
        slot_bytes=sum(math.prod(slot.shape) * itemsize(slot.dtype) for slot in others),
        trainable=trainable,
    )


def _with_loads(specs: list[VariableSpec], loads: Mapping[str, float]) -> list[VariableSpec]:
    paths = {spec.path for spec in specs}
    for path in loads:
        if path not in paths:
            raise PlacementError(
                f"loads must name variables of the model, got {path!r}."
                f" {nearest_paths(path, sorted(paths))}"
            )
    return [replace(spec, load=loads.get(spec.path)) for spec in specs]
