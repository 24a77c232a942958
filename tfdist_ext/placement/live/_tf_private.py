"""The private names of TensorFlow that placement uses, each with the reason."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_ext.errors import PlacementError
from tfdist_ext.private_names import PrivateNames

NAMES = PrivateNames(
    "tensorflow.python",
    PlacementError,
    {
        "distribute.ps_values.CachingVariable": "counters on parameter servers",
        "distribute.sharded_variable.ShardedVariable": "variables in shards",
        "eager.record.record_operation": "gradients of variables in shards",
        "eager.tape.variable_accessed": "gradients of variables in shards",
        "ops.resource_variable_ops.variable_accessed": "gradients of variables in shards",
    },
)


def partitioned(pieces: Sequence[tf.Variable], name: str) -> Any:
    """One variable of pieces along axis 0, as ParameterServerStrategy creates it."""
    return server_variable_class()(list(pieces), name=name)


# The number of the piece that is being updated. Variables in pieces behave as this piece then.
piece_number: ContextVar[int | None] = ContextVar("piece_number", default=None)


@contextlib.contextmanager
def as_piece(number: int) -> Iterator[None]:
    """Scope in which variables in pieces behave as their pieces of this number."""
    token = piece_number.set(number)
    try:
        yield
    finally:
        piece_number.reset(token)


def piece_being_updated(value: Any) -> Any:
    """The piece of a variable that an update is for; the variable itself if it is for all."""
    number = piece_number.get()
    if number is None or not isinstance(value, server_variable_class()):
        return value
    return list(value)[number]


class _InPieces:
    """What TensorFlow's class of variables in pieces lacks."""

    _variables: list[Any]
    numpy: Any

    @property
    def device(self) -> str:
        """The device of the first piece. Keras writes a checkpoint from there."""
        return str(self._variables[0].device)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.numpy(), dtype)


class _OnServers(_InPieces):
    """What needs no private name of TensorFlow in the class of `server_variable_class`."""

    @property
    def trainable(self) -> bool:
        return bool(self._variables[0].trainable)

    @property
    def _unique_id(self) -> str:
        """The key by which optimizers find slots, also while a piece is being updated."""
        return str(self._variables[0]._unique_id).replace("part_0", "sharded")

    def __getitem__(self, index: Any) -> tf.Tensor:
        # TensorFlow's method reads pieces that no tape connects with this variable.
        return tf.convert_to_tensor(self)[index]

    def _convert_variables_to_tensors(self) -> tf.Tensor:
        """The value of a variable that a branch of a `tf.cond` returns."""
        return tf.convert_to_tensor(self)


@functools.cache
def server_variable_class() -> Any:
    """A variable in pieces on parameter servers, with one gradient for a custom training loop.

    Private because TensorFlow gives its class no public name, and because a tape only follows
    operations: it must be recorded as an operation that the variable consists of its pieces.

    TensorFlow reads and updates the pieces. A tape watches each piece that is read, but
    `tape.gradient(loss, keras_variable)` asks for the gradient of the variable's `handle`. Here
    this is a handle of the whole shape, which nothing reads. Each tape that sees a read records
    that the pieces come from this handle, so that their gradients are joined as its gradient.
    """
    # Look up all names now: C++ asks for a handle, and would not pass on an error of ours.
    sharded: Any = NAMES("distribute.sharded_variable.ShardedVariable")
    variable_accessed = NAMES("ops.resource_variable_ops.variable_accessed")
    watched_by_tapes = NAMES("eager.tape.variable_accessed")
    record_operation = NAMES("eager.record.record_operation")

    class ServerVariable(_OnServers, sharded):
        @property
        def variables(self) -> list[Any]:
            """The pieces, which the caller is about to read."""
            pieces: list[Any] = super().variables
            if self.trainable:
                # A tf.function remembers this access, and repeats it when it is called again under
                # another tape. A record for the open tapes would be lost.
                variable_accessed(self)
            number = piece_number.get()
            return pieces if number is None else [pieces[number]]

        @property
        def handle(self) -> Any:
            whole = self._saving_variable
            if self.trainable:
                # A tape only records operations on what it watches already.
                watched_by_tapes(whole)
                record_operation(
                    "PiecesOfVariable",
                    [piece.handle for piece in self._variables],
                    [whole.handle],
                    functools.partial(_joined_gradient, self),
                )
            return whole.handle

    for name in ("assign", "assign_add", "assign_sub"):
        setattr(ServerVariable, name, _of_piece(sharded, name))
    for name in ("add", "div", "max", "min", "mul", "sub", "update"):
        setattr(ServerVariable, f"scatter_{name}", _of_piece(sharded, f"scatter_{name}"))
    return ServerVariable


def _joined_gradient(variable: Any, *gradients: Any) -> list[Any]:
    """The gradients of the pieces as one: slices if one of them is, else a whole tensor."""
    if not any(isinstance(gradient, tf.IndexedSlices) for gradient in gradients):
        return [tf.concat(gradients, axis=0)]
    slices = [_slices(gradient) for gradient in gradients]
    indices = [
        tf.cast(piece.indices, tf.int64) + offset[0]
        for piece, offset in zip(slices, variable._var_offsets, strict=True)
    ]
    values = tf.concat([piece.values for piece in slices], axis=0)
    shape = tf.constant(variable.shape.as_list(), tf.int64)
    return [tf.IndexedSlices(values, tf.concat(indices, axis=0), shape)]


def _of_piece(sharded: type, name: str) -> Any:
    """A method that changes the variable, or only the piece that is being updated."""
    of_whole = getattr(sharded, name)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        number = piece_number.get()
        if number is None:
            return of_whole(self, *args, **kwargs)
        return getattr(self._variables[number], name)(*args, **kwargs)

    return method


def _slices(gradient: Any) -> tf.IndexedSlices:
    if isinstance(gradient, tf.IndexedSlices):
        return gradient
    return tf.IndexedSlices(gradient, tf.range(tf.shape(gradient)[0]))


@functools.cache
def partitioned_variable_class() -> Any:
    """A variable in pieces along axis 0. All replicas of a strategy share each piece.

    Private as above. TensorFlow's class is not a tf.Variable. The class here has the attributes
    that Keras asks a variable for, or says that they are missing.

    Attributes:
        path: name of the variable in messages.
    """
    sharded: Any = NAMES("distribute.sharded_variable.ShardedVariable")

    class PartitionedVariable(_InPieces, sharded):
        def __init__(self, pieces: Sequence[Any], name: str, path: str):
            super().__init__(list(pieces), name=name)
            self.path = path
            self._plain = partitioned([piece.get() for piece in pieces], name)

        def get(self) -> Any:
            """The same variable with plain pieces, outside of the strategy."""
            return self._plain

        @property
        def handle(self) -> Any:
            # TensorFlow asks with hasattr, so the error must be an AttributeError.
            raise AttributeError(
                f"{self.path!r} has no single gradient, because it is cut into"
                f" {len(self._variables)} pieces. Train with tfdist_ext.distribute(build, strategy)"
                " instead of Keras's fit. In a custom training loop, take the gradients of the"
                " pieces, variable.variables."
            )

    return PartitionedVariable


def as_counter(made: Any, kwargs: dict[str, Any]) -> tf.Variable:
    """The variable on a server that these arguments made; if it counts, updates add up.

    Private because the type is.
    """
    first_only = kwargs.get("aggregation") == tf.VariableAggregation.ONLY_FIRST_REPLICA
    counts = is_summed_on_read(kwargs) or (first_only and made.dtype.is_integer)
    if counts and type(made) is NAMES("distribute.ps_values.CachingVariable"):
        made.__class__ = _counter_class()
    return made


def is_summed_on_read(kwargs: dict[str, Any]) -> bool:
    """Whether these are the arguments of a metric's variable."""
    on_read = kwargs.get("synchronization") == tf.VariableSynchronization.ON_READ
    return on_read and kwargs.get("aggregation") == tf.VariableAggregation.SUM


@functools.cache
def _counter_class() -> Any:
    """A variable on a server: `assign(self + x)` in a graph adds x to what is there then.

    Keras counts so in metrics and `optimizer.iterations`. Between the read and the assignment other
    workers count, too. Private because its base is.
    """
    base: Any = NAMES("distribute.ps_values.CachingVariable")

    class Counter(base):
        _last_read: tf.Tensor | None = None

        def assign(self, value: Any, *args: Any, **kwargs: Any) -> Any:
            if tf.executing_eagerly():
                return super().assign(value, *args, **kwargs)
            before = self._last_read
            if before is None or before.graph is not tf.compat.v1.get_default_graph():
                before = self.read_value()
            change = tf.convert_to_tensor(value, self.dtype) - before
            with tf.device(self.device):
                return self.assign_add(change, *args, **kwargs)

        def assign_add(self, *args: Any, **kwargs: Any) -> Any:
            self._last_read = None
            return super().assign_add(*args, **kwargs)

        def assign_sub(self, *args: Any, **kwargs: Any) -> Any:
            self._last_read = None
            return super().assign_sub(*args, **kwargs)

        def _read(self, value: tf.Tensor) -> tf.Tensor:
            self._last_read = None if tf.executing_eagerly() else value
            return value

        def value(self) -> tf.Tensor:
            return self._read(super().value())

        def read_value(self) -> tf.Tensor:
            return self._read(super().read_value())

        def _dense_var_to_tensor(self, *args: Any, **kwargs: Any) -> tf.Tensor:
            return self._read(super()._dense_var_to_tensor(*args, **kwargs))

    return Counter
