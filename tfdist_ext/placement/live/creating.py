"""Creates variables where a placer decides, and updates the pieces of a variable one by one.

TensorFlow calls variable creators from the innermost scope outwards. The creator of a scope that is
entered after the strategy's scope decides, and cuts variables. The creator of a scope that is
entered before it is called inside the strategy's choice of a device, and overrides this choice.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from tfdist_ext.placement.live._tf_private import partitioned
from tfdist_ext.placement.live.initial_values import InitialValue, with_known_rows
from tfdist_ext.placement.live.learning import is_learning
from tfdist_ext.placement.placer import ServerPlacer
from tfdist_ext.placement.rules import nearest_paths
from tfdist_ext.placement.specs import VariableSpec, itemsize
from tfdist_ext.user_frames import warn

# For each piece: device, first row, row after its last, and further arguments of its creator.
Where: TypeAlias = list[tuple[str, int, int, dict[str, Any]]]

# The device of the piece that is being created.
_device: ContextVar[str | None] = ContextVar("device", default=None)

_PS = re.compile(r"/job:ps/.*task:([0-9]+)")


def is_partitioned(value: object) -> bool:
    """Whether a variable's raw value consists of pieces (a ShardedVariable)."""
    # Ask the class: a variable with copies is read when its instance lacks an attribute.
    return hasattr(type(value), "is_sharded_variable")


def pieces_of(value: tf.Variable) -> list[tuple[tf.Variable, int, int]]:
    """(piece, its first row, row after its last) of a raw value; a plain variable is one piece."""
    if not is_partitioned(value):
        return [(value, 0, value.shape[0] if value.shape.rank else 1)]
    pieces = list(value)  # not `value.variables`, which counts as a read for open tapes
    ends = np.cumsum([piece.shape[0] for piece in pieces]).tolist()
    return list(zip(pieces, [0, *ends[:-1]], ends, strict=True))


def override_device_scope() -> contextlib.AbstractContextManager[None]:
    """Scope to enter before the strategy's: creates variables on the device decided on.

    Initial values are computed there, too: a slot is never a tensor of this process first.
    """

    def creator(next_creator: Callable[..., tf.Variable], **kwargs: Any) -> tf.Variable:
        beside = kwargs.get("colocate_with")
        device = _device.get() or (None if beside is None else beside.device)
        value = kwargs.get("initial_value")
        # TensorFlow places a value that is restored from a checkpoint.
        if device is None or value is None or hasattr(value, "checkpoint_position"):
            return next_creator(**kwargs)
        with tf.device(device):
            value = with_known_rows(kwargs)
            kwargs["initial_value"] = value() if callable(value) else value
            return next_creator(**kwargs)

    return tf.variable_creator_scope(creator)


def placing(placer: ServerPlacer) -> contextlib.AbstractContextManager[None]:
    """Scope to enter after the strategy's: decides where each new variable lives."""

    def creator(next_creator: Callable[..., tf.Variable], **kwargs: Any) -> tf.Variable:
        value = kwargs.get("initial_value")
        if (
            _device.get() is not None  # a scope inside of this one has decided
            or is_learning()
            or value is None
            or hasattr(value, "checkpoint_position")
            or kwargs.get("per_worker_variable")
        ):
            return next_creator(**kwargs)
        if kwargs.get("colocate_with") is not None:
            made = beside_pieces(next_creator, **kwargs)
            _count(placer, made)
            return made
        return _placed(placer, next_creator, kwargs)

    return tf.variable_creator_scope(creator)


def beside_pieces(next_creator: Callable[..., tf.Variable], **kwargs: Any) -> tf.Variable:
    """A variable beside another one, in pieces if the other one is.

    TensorFlow never partitions a variable with `colocate_with`, and cannot put it beside pieces.
    """
    beside = kwargs.pop("colocate_with")
    if not is_partitioned(beside):
        return next_creator(colocate_with=beside, **kwargs)
    initial = InitialValue(kwargs, where=beside.variables[0].device)
    where: Where = [
        (piece.device, start, stop, {"colocate_with": piece})
        for piece, start, stop in pieces_of(beside)
    ]
    return partitioned(made_in_pieces(next_creator, kwargs, initial, where), _name(kwargs))


def _placed(
    placer: ServerPlacer, next_creator: Callable[..., tf.Variable], kwargs: dict[str, Any]
) -> tf.Variable:
    initial = InitialValue(kwargs, where=_of_task(placer.fewest_bytes))
    spec = initial.spec
    # A `tf.device` scope in user code that names a parameter server overrides the placement.
    if (asked := _task_of(tf.zeros([]).device)) is not None:
        placer.add(asked, spec.bytes)
        shards = spec.shards([asked])
    else:
        if initial.of_keras and spec.trainable and not placer.knows(spec):
            _warn_of_unplanned(placer, spec)
        shards = placer.place(spec)
    if len(shards) == 1:
        with _on_device(_of_task(shards[0].task)):
            return next_creator(**{**kwargs, "initial_value": initial.value})
    where: Where = [(_of_task(shard.task), shard.start, shard.stop, {}) for shard in shards]
    return partitioned(made_in_pieces(next_creator, kwargs, initial, where), _name(kwargs))


def made_in_pieces(
    next_creator: Callable[..., tf.Variable],
    kwargs: dict[str, Any],
    initial: InitialValue,
    where: Where,
) -> list[tf.Variable]:
    """The pieces of a variable, each made by `next_creator` with its own rows' initial value."""
    pieces = []
    for number, (device, start, stop, more) in enumerate(where):
        own = {
            "initial_value": functools.partial(initial.rows, start, stop),
            "name": f"{_name(kwargs)}/part_{number}",
            "shape": (stop - start, *initial.spec.shape[1:]),
        }
        with _on_device(device):
            pieces.append(next_creator(**{**kwargs, **own, **more}))
    return pieces


def _name(kwargs: dict[str, Any]) -> str:
    return kwargs.get("name") or "Variable"


@contextlib.contextmanager
def _on_device(device: str) -> Iterator[None]:
    token = _device.set(device)
    try:
        yield
    finally:
        _device.reset(token)


def _of_task(task: int) -> str:
    return f"/job:ps/task:{task}/device:CPU:0"


def _task_of(device: str | None) -> int | None:
    match = _PS.search(device or "")
    return None if match is None else int(match[1])


def _count(placer: ServerPlacer, made: tf.Variable) -> None:
    for piece, _, _ in pieces_of(made):
        task = _task_of(piece.device)
        if task is not None and piece.shape.is_fully_defined():
            placer.add(task, piece.shape.num_elements() * itemsize(piece.dtype.name))


def _warn_of_unplanned(placer: ServerPlacer, spec: VariableSpec) -> None:
    paths = [] if placer.plan is None else [known.path for known in placer.plan.specs]
    warn(
        f"the plan has no variable {spec.path!r} of shape {list(spec.shape)}; it is placed"
        f" as without a plan. {nearest_paths(spec.path, paths)} Keras numbers"
        " the names of layers. Pass the function that builds the model to distribute(), which"
        " uses the names of the plan."
    )


def with_each_piece(raw: Any, args: Sequence[Any]) -> Iterator[tuple[int, Any, list[Any]]]:
    """(number, piece, its arguments of an update) for each piece of a raw value.

    A piece gets its rows of a gradient. Other arguments, and variables that are in pieces
    themselves, are passed to all pieces. A plain variable is one piece.
    """

    def part(arg: Any, first: int, end: int) -> Any:
        if isinstance(arg, keras.Variable) or not tf.is_tensor(arg):
            return arg
        # While the step is traced, the shape of a gradient may be unknown. That of a learning rate
        # is known.
        of_all = arg.shape.rank != 0 and arg.shape.is_compatible_with(raw.shape)
        whole = isinstance(arg, tf.IndexedSlices) or of_all
        return _rows_in_range(arg, first, end) if whole else arg

    for number, (piece, first, end) in enumerate(pieces_of(raw)):
        own_args = [part(arg, first, end) for arg in args] if is_partitioned(raw) else list(args)
        yield number, piece, own_args


def _rows_in_range(value: Any, first: int, end: int) -> Any:
    """The rows of a gradient from first to before end, as the gradient of a piece."""
    if not isinstance(value, tf.IndexedSlices):
        return value[first:end]
    in_range = tf.logical_and(value.indices >= first, value.indices < end)
    return tf.IndexedSlices(
        tf.boolean_mask(value.values, in_range),
        tf.boolean_mask(value.indices, in_range) - first,
        dense_shape=tf.constant([end - first, *value.values.shape[1:]]),
    )
