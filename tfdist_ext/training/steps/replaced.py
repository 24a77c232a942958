"""Replaces functions of Keras and TensorFlow in the threads of a running step.

Keras's losses, layers and optimizers call each other, and user code calls them directly, so there
is no other way to change what they do. `_keras_private.REPLACED` lists the functions, each with its
reason. They are replaced only while a step is traced, or runs eagerly. Other threads get the
original. (`callbacks/in_cluster.py` replaces `keras.Model.fit` in the same way.)

A new release of Keras may compute something without calling one of them. The step would then train
on wrong numbers. `check_called` finds this when a step is traced, or first runs eagerly.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import types
from collections.abc import Callable, Container, Iterator, Mapping, Sequence, Set
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import keras
import tensorflow as tf

from tfdist_ext.errors import TrainingError
from tfdist_ext.training._keras_private import REPLACED, flat_layers

__all__ = [
    "Original",
    "Target",
    "check_activity_regularizers",
    "check_called",
    "functions_in_place",
    "not_called",
    "redirect_methods",
    "step_of",
    "step_targets",
    "substitutes",
    "target_of",
    "uses_keras_step",
]


# A function of Keras or TensorFlow, as its replacement gets it.
Original: TypeAlias = Callable[..., Any]


class Target(NamedTuple):
    """A function, or a property, that can be replaced.

    Attributes:
        key: its key in `substitutes`. Several functions may do the same job.
        owner: the class or module that defines it.
        name: its attribute there.
    """

    key: str
    owner: type | types.ModuleType
    name: str


class _Step(threading.local):
    """The substitutes that are active in this thread, by key: `substitute(original, *args)`."""

    substitutes: Mapping[str, Callable[..., Any] | None] = MappingProxyType({})
    called: set[str] | None = None  # keys; None: not recorded


_step = _Step()


_lock = threading.RLock()  # Ctrl-C may come, and leave a scope, while this thread has it


# By owner and name of a function that is replaced now: the original, and by how many scopes.
_originals: dict[tuple[type | types.ModuleType, str], tuple[Any, int]] = {}


@contextlib.contextmanager
def substitutes(
    functions: Mapping[str, Callable[..., Any] | None] | None, called: set[str] | None = None
) -> Iterator[None]:
    """Scope in which this thread calls substitutes in place of the originals.

    Args:
        functions: by key, functions that get the original and its arguments. They are added to
            those of the scope around this one. None removes all substitutes.
        called: receives the keys of the substitutes that are called.
    """
    before = _step.substitutes, _step.called
    _step.substitutes = {} if functions is None else {**_step.substitutes, **functions}
    _step.called = called
    try:
        yield
    finally:
        _step.substitutes, _step.called = before


@contextlib.contextmanager
def functions_in_place(targets: Sequence[Target]) -> Iterator[None]:
    """Scope in which the targets call the substitutes of the current thread.

    Several threads may be in it. When the last one leaves, the originals are back.
    """
    with contextlib.ExitStack() as stack:
        for target in targets:
            stack.enter_context(_in_place(target))
        yield


@contextlib.contextmanager
def _in_place(target: Target) -> Iterator[None]:
    key, owner, name = target
    with _lock:
        original, users = _originals.get((owner, name), (vars(owner)[name], 0))
        _originals[owner, name] = original, users + 1
        if not users:
            is_property = isinstance(original, property)
            asking = (_asking_by_type if key == "draw" else _asking)(
                key, original.fget if is_property else original
            )
            setattr(owner, name, property(asking) if is_property else asking)
    try:
        yield
    finally:
        with _lock:
            original, users = _originals.pop((owner, name))
            if users > 1:
                _originals[owner, name] = original, users - 1
            else:
                setattr(owner, name, original)


@functools.cache
def step_targets() -> list[Target]:
    """The targets of a step: the functions of `REPLACED` that exist in this release."""
    found = []
    for replaced in REPLACED:
        with contextlib.suppress(ImportError, AttributeError):
            owner, name = replaced.place()
            found.append(target_of(replaced.key, owner, name))
    return found


def target_of(key: str, owner: type | types.ModuleType, name: str) -> Target:
    """Returns the target of a function of a module or a class, which may inherit it.

    Raises:
        AttributeError: the owner has no such function.
    """
    for each in inspect.getmro(owner) if isinstance(owner, type) else [owner]:
        if name in vars(each):
            return Target(key, each, name)
    raise AttributeError(f"{owner!r} has no {name!r}")


def _asking(key: str, original: Any) -> Callable[..., Any]:
    """Returns a wrapper of an original that calls the substitute of this thread."""

    @functools.wraps(original)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        substitute = _step.substitutes.get(key)
        if substitute is None:
            return original(*args, **kwargs)
        if _step.called is not None:
            _step.called.add(key)
        return substitute(original, *args, **kwargs)

    return chosen


def _asking_by_type(key: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a wrapper of a function that makes operations of all types.

    The substitute of a type gets the operation's function of `tf.raw_ops`, the result of the
    operation that was asked for, and the arguments of the operation by name.
    """

    @functools.wraps(original)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        # In a graph: type, and arguments by name. In eager code: context, type, name, inputs, and
        # names and values of attributes.
        in_graph = isinstance(args[0], str)
        kind = args[0] if in_graph else args[1]
        substitute = _step.substitutes.get(kind)
        if substitute is None:
            return original(*args, **kwargs)
        if _step.called is not None:
            _step.called.add(key)
        raw = getattr(tf.raw_ops, kind)
        result = original(*args, **kwargs)
        kwargs.pop("name", None)
        with substitutes({kind: None}, _step.called):
            if in_graph:
                *others, outputs = result
                return (*others, [substitute(raw, outputs[0], **kwargs)])
            values = args[3:]
            first = next(i for i, value in enumerate([*values, ""]) if isinstance(value, str))
            inputs = zip(inspect.signature(raw).parameters, values[:first], strict=False)
            attributes = zip(values[first::2], values[first + 1 :: 2], strict=True)
            return substitute(raw, result, **dict(inputs), **dict(attributes))

    return chosen


def uses_keras_step(model: keras.Model, kind: str) -> bool:
    """Whether a "train", "test" or "predict" step is the one that Keras's own models have."""
    step = getattr(model, f"{kind}_step")
    return getattr(step, "__func__", None) is getattr(keras.Model, f"{kind}_step")


def check_called(model: keras.Model, kind: str, called: Set[str], written: Container[int]) -> None:
    """Checks that a "train" or "test" step has called what its model must call.

    "replicas" shows only that Keras has read the number once; the loss tracker reads it, too.

    Args:
        called: keys of `REPLACED` that the step has called.
        written: ids of the variables that the step has written.

    Raises:
        TrainingError: a function that is replaced in steps was not called.
    """
    expected = ["reduce_loss"] if "loss" in called else []
    if uses_keras_step(model, kind):
        expected += ["clear_losses", "update_mean"]
        if model.loss is not None and type(model).compute_loss is keras.Model.compute_loss:
            reduced = any(map(_is_reduced, keras.tree.flatten(model.loss)))
            expected += ["replicas", "loss"] if reduced else ["replicas"]
        if kind == "train" and model.trainable_variables:
            expected += ["gradient", "apply"]
    for layer in flat_layers(model):
        if isinstance(layer, keras.layers.BatchNormalization) and layer.synchronized:
            is_written = id(layer.moving_mean) in written
            expected += ["moments"] if is_written else []
        if isinstance(layer, keras.layers.Dropout) and layer.rate:
            expected += ["draw"] if id(layer.seed_generator.state) in written else []
    for key in expected:
        if key not in called:
            raise not_called(key)


def _is_reduced(loss: object) -> bool:
    """Whether one of the losses given to `compile` is called as Keras's own are."""
    if isinstance(loss, keras.losses.Loss):
        return type(loss).__call__ is keras.losses.Loss.__call__
    return loss is not None


def check_activity_regularizers(model: keras.Model) -> None:
    """Raise TrainingError if this release of Keras sums the losses of activities over rows."""
    if tuple(map(int, keras.__version__.split(".")[:2])) >= (3, 14):
        return
    for layer in flat_layers(model):
        if layer.activity_regularizer is not None:
            raise TrainingError(
                f"The activity_regularizer of layer {layer.name!r} is not supported on several"
                f" replicas with Keras {keras.__version__}, which adds the sum over the examples of"
                " a replica. Install Keras 3.14 or newer, or call add_loss with one number per"
                " example in a layer of your own."
            )


def step_of(model: keras.Model, kind: str) -> Callable[..., Any]:
    """Returns the model's "train", "test" or "predict" step."""
    step = getattr(model, f"{kind}_step")
    # Replicas cannot communicate inside the separate graph of a user's tf.function.
    return getattr(step, "python_function", step)


def not_called(key: str) -> TrainingError:
    """Returns the error of a step that did not call the functions of a key."""
    functions = [replaced for replaced in REPLACED if replaced.key == key]
    names = " or ".join(str(replaced) for replaced in functions)
    return TrainingError(
        f"the step must call {names}, where its numbers become those of the global batch"
        f" ({functions[0].why}), and Keras {keras.__version__} with TensorFlow {tf.__version__} did"
        " not. The training would be wrong with this release: install versions"
        " that docs/compatibility.md lists as tested, or a newer tfdist_ext."
    )


@contextlib.contextmanager
def redirect_methods(
    model: keras.Model | keras.metrics.Metric, **methods: Callable[..., Any]
) -> Iterator[None]:
    """Scope in which `methods` shadow those of a model or a metric."""
    attributes = vars(model)
    before = {name: attributes[name] for name in methods if name in attributes}
    attributes.update(methods)
    try:
        yield
    finally:
        for name in methods:
            del attributes[name]
        attributes.update(before)
