"""Learns the variables of a model and its optimizer's slots without allocating them."""

from __future__ import annotations

import contextlib
import functools
import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from tfdist_ext.errors import PlacementError
from tfdist_ext.messages import shown
from tfdist_ext.placement.live._keras_private import leaving_no_names, variable_behind
from tfdist_ext.placement.placement_plan import PlacementPlan
from tfdist_ext.placement.placer import plan_in_order
from tfdist_ext.placement.planning import plan, plan_owners
from tfdist_ext.placement.rules import Rules
from tfdist_ext.placement.specs import VariableSpec
from tfdist_ext.user_frames import filter_traceback

_learning: ContextVar[bool] = ContextVar("learning", default=False)

_SMALL = 1024  # values: so small a variable gets values

# The update of a row depends on no other row, so each piece can be updated alone.
_BY_ROW = (
    keras.optimizers.SGD,
    keras.optimizers.RMSprop,
    keras.optimizers.Adadelta,
    keras.optimizers.Adagrad,
    keras.optimizers.Adamax,
    keras.optimizers.Adam,
    keras.optimizers.AdamW,
    keras.optimizers.Nadam,
    keras.optimizers.Ftrl,
    keras.optimizers.Lion,
)

Model: TypeAlias = keras.Model | Callable[[], keras.Model]
Slots: TypeAlias = dict[int, list[keras.Variable]]  # id of a variable -> its slots


@filter_traceback
def plan_placement(
    model_or_builder: Model,
    *,
    ps: int | None = None,
    devices: Sequence[str] | None = None,
    workers: int | None = None,
    rules: Rules = (),
    optimizer: str | keras.optimizers.Optimizer | None = None,
    budget: int | str | None = None,
) -> PlacementPlan:
    """Plans the placement of the variables of a model, without allocating them.

    A function that builds the model is called once, with variables that have no values. So you can
    plan a model of 200 GB on a laptop. The call does not change the names and random numbers of
    Keras. Pass one of `ps`, `devices` and `workers`.

    Args:
        model_or_builder: a function without arguments that returns a built model, or a built model.
            `keras.Input` or `model.build` builds a model.
        ps: the number of parameter servers.
        devices: the names of the devices of one machine, such as ["CPU:0", "GPU:0"].
        workers: the number of workers that divide the optimizer state (`shard_optimizer=True`).
            `workers` cannot be combined with `rules`.
        rules: a list such as [Rule("users/.*", Sharded(4))], or a dict such as
            {"users/.*": "sharded(4)"}. Without rules, the plan for parameter servers is what
            happens without `placement`. {".*": "balanced"} plans like `placement="balanced"`.
        optimizer: an optimizer, by name or as an object. The plan includes its slots. The default
            is the optimizer of the model.
        budget: the largest size per server, device or worker, in bytes or as a string such as
            "8GiB".

    Returns:
        A `PlacementPlan`.

    Raises:
        PlacementError: the model is not built, a rule is invalid, or the variables do not fit. The
            message contains the smallest sufficient budget.
    """
    model, optimizer, specs, order = _learn(model_or_builder, optimizer)
    if not rules and workers is None and devices is None and ps is not None:
        in_order = sorted(specs, key=lambda spec: order.get(spec.path, math.inf))
        return plan_in_order(in_order, ps, budget=budget)
    if workers is None:
        return plan(specs, ps, devices=devices, rules=rules, budget=budget)
    if rules or ps is not None or devices is not None:
        raise PlacementError(
            "workers= cannot be combined with rules, ps= or devices=. Remove them."
        )
    whole = {v.path for v in model.trainable_variables if not rows_can_be_owned(v, optimizer)}
    return plan_owners(specs, workers, is_cut=lambda spec: spec.path not in whole, budget=budget)


def learn_specs(
    model_or_builder: Model, optimizer: str | keras.optimizers.Optimizer | None = None
) -> list[VariableSpec]:
    """Every variable of the model, with its slots, in the order of `model.variables`.

    Raises:
        PlacementError: the model is not a model or not built, the builder computes with values, or
            Keras has no such optimizer.
    """
    return _learn(model_or_builder, optimizer)[2]


def _learn(
    model_or_builder: Model, optimizer: str | keras.optimizers.Optimizer | None
) -> tuple[keras.Model, keras.optimizers.Optimizer | None, list[VariableSpec], dict[str, int]]:
    """The model, its optimizer, its specs, and path -> number in the order of creation."""
    with _nothing_allocated() as created:
        if isinstance(model_or_builder, keras.Model):
            model, finished = model_or_builder, True
        else:
            model, finished = _built(model_or_builder), False
        if not model.variables:
            raise PlacementError(
                f"the model {model.name!r} has no variables, because it is not built. Start it with"
                " keras.Input(shape), or call model.build(shape) in the function."
            )
        chosen = getattr(model, "optimizer", None) if optimizer is None else optimizer
        if chosen is not None and (finished or optimizer is not None):
            chosen = _optimizer(chosen)
        slots = {} if chosen is None else _slots(chosen, model.trainable_variables)
        order = {variable.path: number for number, variable in enumerate(created)}
        return model, chosen, _specs(model, chosen, slots), order


def is_learning() -> bool:
    """Whether variables are created for their shapes alone."""
    return _learning.get()


@contextlib.contextmanager
def _nothing_allocated() -> Iterator[list[keras.Variable]]:
    """Scope in which Keras's variables have shapes and no values. Yields the created variables."""
    created: list[keras.Variable] = []
    state, state_of_numpy = random.getstate(), np.random.get_state()
    token = _learning.set(True)
    try:
        creator = functools.partial(_without_value, created)
        with leaving_no_names(), tf.variable_creator_scope(creator):
            yield created
    finally:
        _learning.reset(token)
        random.setstate(state)
        np.random.set_state(state_of_numpy)


def _without_value(
    created: list[keras.Variable], next_creator: Callable[..., tf.Variable], **kwargs: Any
) -> tf.Variable:
    behind = variable_behind(kwargs.get("initial_value"))
    if behind is not None:
        variable, _ = behind
        created.append(variable)
        if math.prod(variable.shape) <= _SMALL:  # some layers reshape them when they are built
            kwargs["initial_value"] = tf.zeros(variable.shape, variable.dtype)
        else:  # Keras takes the shape from its own variable
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
            f"the function that builds the model failed, called with variables without values:"
            f" {error} If it computes with values, pass the built model instead."
        ) from error
    if not isinstance(model, keras.Model):
        raise PlacementError(
            f"the function that builds the model returned {shown(model)}, not a keras.Model."
        )
    return model


def _optimizer(chosen: Any) -> keras.optimizers.Optimizer:
    """A new optimizer with the same settings, because the user's own must not be built."""
    try:
        if isinstance(chosen, keras.optimizers.Optimizer):
            return type(chosen).from_config(chosen.get_config())
        return keras.optimizers.get(chosen)
    except (ValueError, TypeError, NotImplementedError) as error:
        raise PlacementError(
            f"optimizer must be a Keras optimizer, or the name of one, got {shown(chosen)}: {error}"
        ) from error


def _slots(optimizer: keras.optimizers.Optimizer, variables: Sequence[keras.Variable]) -> Slots:
    """Build the optimizer, and record which slots it creates for which variable."""
    slots: Slots = defaultdict(list)
    inner = optimizer
    while getattr(inner, "inner_optimizer", None) is not None:  # loss scaling
        inner = inner.inner_optimizer
    make = inner.add_variable_from_reference

    def recorded(reference_variable: keras.Variable, *args: Any, **kwargs: Any) -> keras.Variable:
        slot = make(reference_variable, *args, **kwargs)
        slots[id(reference_variable)].append(slot)
        return slot

    inner.add_variable_from_reference = recorded
    optimizer.build(variables)
    return slots


def _specs(
    model: keras.Model, optimizer: keras.optimizers.Optimizer | None, slots: Slots
) -> list[VariableSpec]:
    trainable = {id(variable) for variable in model.trainable_variables}
    specs = [
        _spec(variable, len(slots.get(id(variable), ())), id(variable) in trainable)
        for variable in model.variables
    ]
    # Counters, and slots that the optimizer creates without naming their variable.
    named = {id(slot) for of_one in slots.values() for slot in of_one}
    others = [] if optimizer is None else optimizer.variables
    specs += [_spec(variable, 0, False) for variable in others if id(variable) not in named]
    # Keras may give one path twice, for example to the states of two seed generators.
    seen: Counter[str] = Counter()
    for index, spec in enumerate(specs):
        seen[spec.path] += 1
        if seen[spec.path] > 1:
            specs[index] = replace(spec, path=f"{spec.path}#{seen[spec.path]}")
    return specs


def _spec(variable: keras.Variable, slots: int, trainable: bool) -> VariableSpec:
    shape = tuple(variable.shape)
    return VariableSpec(variable.path, shape, variable.dtype, slots=slots, trainable=trainable)


def updates_by_row(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether an optimizer can update each row of a variable alone.

    The class of a user's optimizer says so by an attribute `updates_by_row`.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return type(inner) in _BY_ROW or bool(getattr(inner, "updates_by_row", False))


def rows_can_be_owned(
    variable: keras.Variable, optimizer: keras.optimizers.Optimizer | None
) -> bool:
    """Whether several workers may own rows of a variable, instead of one worker all rows.

    A constraint such as `MaxNorm` looks at all rows.
    """
    return variable.constraint is None and (optimizer is None or updates_by_row(optimizer))
