"""Variables as one replica or worker sees them: copies, shards, slots, and who updates them.

What an optimizer does after gradients are summed is the same on every replica. Inside a strategy
its conditions fail (a cond cannot contain a cross-replica call) and its assignments take detours.
On the plain tf.Variables that lie behind the distributed ones, Keras's code runs as on one device
(`LocalCopies`, `default_strategy_scope`).

A variable in pieces is read and differentiated as one (`placement.live._tf_private`).
`UpdatesInPlace` updates each piece on its own device.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Self, TypeVar

import keras
import tensorflow as tf

from tfdist_ext.placement.live._tf_private import as_piece, partitioned
from tfdist_ext.placement.live.creating import (
    beside_pieces,
    is_partitioned,
    pieces_of,
    with_each_piece,
)
from tfdist_ext.placement.live.learning import updates_by_row
from tfdist_ext.strategies import StrategyTemplate
from tfdist_ext.strategies._tf_private import with_scalar_conversions
from tfdist_ext.training._keras_private import (
    distribution_strategy_of,
    flat_layers,
    key_of,
    raw_value,
    step_variables,
)

_Kind = TypeVar("_Kind")

_SHORT = 1000  # entries of a list or dict that may hold optimizers; a vocabulary has more
SHARDED = "_tfdist_ext_sharded"  # an attribute of an optimizer


class LocalCopies(keras.StatelessScope):
    """Scope in which each Keras variable is a plain tf.Variable, read and assigned at once.

    The step number and the learning rate of an optimizer are read once in each graph until they are
    assigned. Keras reads them for each variable. From one read, TensorFlow computes values such as
    the corrections of Adam once for all variables.

    Args:
        copy_of: Keras variable -> the plain variable to use for it, which may be in pieces.
        optimizers: the optimizers that update variables in this scope.
    """

    def __init__(
        self,
        copy_of: Callable[[keras.Variable], tf.Variable],
        optimizers: Iterable[keras.optimizers.Optimizer],
    ):
        super().__init__(initialize_variables=False)
        self._copy_of = copy_of
        self._used: dict[int, keras.Variable] = {}
        self._of_steps = {id(v) for optimizer in optimizers for v in step_variables(optimizer)}
        # By variable and graph: the tensors of a cond or a loop cannot be used outside of it.
        self._read: dict[tuple[int, tf.Graph], tf.Tensor] = {}

    @property
    def used(self) -> list[keras.Variable]:
        """The Keras variables that were read or assigned."""
        return list(self._used.values())

    def get_current_value(self, variable: keras.Variable) -> tf.Variable | tf.Tensor:
        if id(variable) not in self._of_steps:
            return self._copy(variable)
        key = id(variable), tf.compat.v1.get_default_graph()
        if key not in self._read:
            self._read[key] = self._copy(variable).read_value()
        return self._read[key]

    def add_update(self, update: tuple[keras.Variable, tf.Tensor]) -> None:
        variable, value = update
        copy = self._copy(variable)
        copy.assign(tf.cast(value, copy.dtype))
        if id(variable) in self._of_steps:
            self._read.clear()

    def _copy(self, variable: keras.Variable) -> tf.Variable:
        self._used[id(variable)] = variable
        return self._copy_of(variable)


class ShardedSlot(NamedTuple):
    """A slot of an optimizer that workers share.

    Attributes:
        variable: the part of this worker.
        shape: of the whole slot.
        owners: (worker, first element, element after the last) of each part.
    """

    variable: keras.Variable
    shape: tuple[int, ...]
    owners: Sequence[tuple[int, int, int]]


def sharded_optimizer_of(optimizer: keras.optimizers.Optimizer) -> Any:
    """The ShardedOptimizer of an optimizer that workers share; None for another one."""
    return vars(optimizer).get(SHARDED)


def sharded_slots(optimizer: keras.optimizers.Optimizer) -> list[ShardedSlot]:
    """Returns the slots of an optimizer that workers share, and of those inside it."""
    sharded = sharded_optimizer_of(optimizer)
    return [] if sharded is None else sharded.slots


class PartOfVariable:
    """A part of a variable, as an optimizer sees a variable.

    Args:
        variable: an optimizer finds slots and settings by its key and its names.
        shape: of the part; None: that of its value.

    Attributes:
        value: of the part; None if it was not read.
    """

    def __init__(self, variable: Any, shape: Any = None):
        self.dtype = variable.dtype
        self.name, self.path = variable.name, getattr(variable, "path", variable.name)
        of_keras = isinstance(variable, keras.Variable)
        self._unique_id = key_of(raw_value(variable) if of_keras else variable)
        self.value: tf.Tensor | None = None
        self._shape = shape

    @property
    def shape(self) -> Any:
        return self.read_value().shape if self._shape is None else self._shape

    def read_value(self) -> tf.Tensor:
        assert self.value is not None, "a part has a value only during an update"
        return self.value

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        return tf.convert_to_tensor(self.read_value(), dtype)

    def assign(self, value: Any) -> None:
        self.value = tf.ensure_shape(tf.cast(value, self.dtype), self.shape)

    def assign_add(self, value: Any) -> None:
        self.assign(self.read_value() + value)

    def assign_sub(self, value: Any) -> None:
        self.assign(self.read_value() - value)

    def scatter_update(self, slices: tf.IndexedSlices) -> None:
        indices = slices.indices[:, tf.newaxis]
        self.assign(tf.tensor_scatter_nd_update(self.read_value(), indices, slices.values))

    def scatter_add(self, slices: tf.IndexedSlices) -> None:
        indices = slices.indices[:, tf.newaxis]
        self.assign(tf.tensor_scatter_nd_add(self.read_value(), indices, slices.values))

    def scatter_sub(self, slices: tf.IndexedSlices) -> None:
        self.scatter_add(tf.IndexedSlices(-slices.values, slices.indices))


def _of_value(name: str) -> Callable[..., tf.Tensor]:
    return lambda part, *args: getattr(part.read_value(), name)(*args)


for _name in ("add", "sub", "mul", "truediv", "pow"):
    setattr(PartOfVariable, f"__{_name}__", _of_value(f"__{_name}__"))
    setattr(PartOfVariable, f"__r{_name}__", _of_value(f"__r{_name}__"))


class Updates:
    """Stands in for the strategy of an optimizer, which calls `strategy.extended.update`."""

    @property
    def extended(self) -> Self:
        return self


class UpdatesInPlace(Updates):
    """Computes each update on the variable's device.

    If the optimizer updates each row alone, each piece of a variable is updated on its own device.
    """

    def __init__(self, optimizer: keras.optimizers.Optimizer):
        self._by_row = updates_by_row(optimizer)

    def update(
        self,
        var: tf.Variable,
        fn: Callable[..., object],
        args: Sequence[Any] = (),
        group: bool = True,
    ) -> None:
        """Call `fn(variable, *args)` on the variable's device, or once for each piece."""
        if is_partitioned(var) and self._by_row:
            for number, piece, values in with_each_piece(var, args):
                with tf.device(piece.device), as_piece(number):
                    fn(var, *values)
            return
        with tf.device(pieces_of(var)[0][0].device):
            fn(var, *args)


def local_copies(
    variable: keras.Variable | tf.Variable, strategy: tf.distribute.Strategy
) -> list[tf.Variable]:
    """The plain tf.Variables that are the copies of a variable on this worker.

    A variable in pieces has one copy, the ShardedVariable of its plain pieces.
    """
    return list(map(_unwrapped, strategy.experimental_local_results(raw_value(variable))))


def _unwrapped(variable: tf.Variable) -> tf.Variable:
    # One copy for all replicas, and one on a server, come in wrappers that insist on a strategy.
    return _unwrapped(variable.get()) if hasattr(variable, "get") else variable


def local_copy(
    variable: keras.Variable, strategy: tf.distribute.Strategy, number: int
) -> tf.Variable:
    """The copy of a variable that a local replica of this number uses."""
    copies = local_copies(variable, strategy)
    return copies[number % len(copies)]


def copies_of_model(
    model: keras.Model, strategy: tf.distribute.Strategy, local_replicas: int
) -> Iterator[Sequence[tf.Variable]]:
    """Of each variable of a model and of its optimizers, the copy that each replica uses."""
    held = [with_inner_optimizers(optimizer) for optimizer in optimizers_of(model).values()]
    owners = [model, *itertools.chain(*held)]
    variables = {id(v): v for owner in owners for v in owner.variables}
    for variable in variables.values():
        copies = [local_copy(variable, strategy, number) for number in range(local_replicas)]
        # A variable in pieces has several tf.Variables.
        yield from zip(*(getattr(copy, "variables", [copy]) for copy in copies), strict=True)


def owner_copy(variable: keras.Variable, strategy: tf.distribute.Strategy) -> tf.Variable:
    """The plain tf.Variable on which an update that is computed once is computed."""
    if isinstance(strategy, StrategyTemplate):
        return strategy.extended.owner_copy(raw_value(variable))
    return local_copy(variable, strategy, 0)


def is_updated_once(
    variables: Sequence[keras.Variable], strategy: tf.distribute.Strategy, local_replicas: int
) -> bool:
    """Whether an update is computed once for all replicas of this worker.

    Otherwise each replica updates its own copies. An update is computed once if replicas share a
    copy, or if the strategy has its own way of applying updates.
    """
    if isinstance(strategy, StrategyTemplate) and strategy.has_own_updates:
        return True
    return any(len(local_copies(variable, strategy)) < local_replicas for variable in variables)


def broadcast_from_owner(
    variables: Sequence[keras.Variable], strategy: tf.distribute.Strategy
) -> None:
    """Copies the owner's value to all other copies. Call it in cross-replica context."""

    def take(copy: tf.Variable, source: tf.Variable, value: tf.Tensor) -> None:
        if copy is not source:
            copy.assign(value)

    for variable in variables:
        if len(local_copies(variable, strategy)) > 1:
            source = owner_copy(variable, strategy)
            with tf.device(source.device):
                value = source.read_value()
            take_value = functools.partial(take, source=source, value=value)
            strategy.extended.update(raw_value(variable), take_value, group=False)


@contextlib.contextmanager
def default_strategy_scope(
    optimizers: Sequence[keras.optimizers.Optimizer] = (),
    updates: object | None = None,
) -> Iterator[None]:
    """Scope in which TensorFlow, Keras and the given optimizers see no strategy.

    Args:
        updates: what the optimizers see instead, an object with `extended.update`.
    """
    instead = _default_context().strategy if updates is None else updates
    with _default_context(), distribution_strategy_of(optimizers, instead):
        yield


def default_strategy() -> tf.distribute.Strategy:
    """TensorFlow's strategy where no strategy is used."""
    return _default_context().strategy


@functools.cache
def _default_context() -> tf.distribute.ReplicaContext:
    """TensorFlow's replica context where no strategy is used."""
    return outside_of_scopes(tf.distribute.get_replica_context)


def outside_of_scopes(function: Callable[..., Any], *args: Any) -> Any:
    """Calls a function outside of all scopes and graphs of this thread, in a new thread."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(function, *args).result()


def variables_of_steps(*, in_pieces: bool) -> contextlib.AbstractContextManager[None]:
    """Scope to enter after the strategy's: creates variables as steps need them.

    `float` reads them, as on one device. Variables of metrics are ordinary mirrored ones. Keras
    creates them to be summed over replicas when they are read. Such a read is a collective, so a
    callback that looks at a metric on the chief alone would wait forever. The replicas' own states
    are in the loop; the variable only shows their aggregate.

    Args:
        in_pieces: variables that TensorFlow partitions become variables on servers like ours. An
            optimizer's slots of such a variable are partitioned alike. The strategies of
            `create_strategy` place variables themselves.
    """

    def creator(next_creator: Callable[..., tf.Variable], **kwargs: Any) -> tf.Variable:
        if kwargs.get("synchronization") == tf.VariableSynchronization.ON_READ:
            kwargs["synchronization"] = tf.VariableSynchronization.AUTO
            kwargs["aggregation"] = tf.VariableAggregation.ONLY_FIRST_REPLICA
        if in_pieces and is_partitioned(kwargs.get("colocate_with")):
            return beside_pieces(next_creator, **kwargs)
        variable = with_scalar_conversions(next_creator(**kwargs))
        if in_pieces and is_partitioned(variable):
            return partitioned(list(variable), variable.name)
        return variable

    return tf.variable_creator_scope(creator)


def copies_of_one_name() -> contextlib.AbstractContextManager[None]:
    """Scope in which all copies on a replica get one name, except on the first replica.

    Enter it before the strategy's own scope, which names each copy after its variable.

    TensorFlow has one kernel for all operations with equal attributes. The name of a variable is an
    attribute of the operation that creates it, and creating a kernel takes most of the time.
    """

    def creator(next_creator: Callable[..., tf.Variable], **kwargs: Any) -> tf.Variable:
        if copy := re.search(r"/(replica_\d+/)$", kwargs.get("name") or ""):
            kwargs["name"] = copy[1]
        return next_creator(**kwargs)

    return tf.variable_creator_scope(creator)


def attributes_of(owner: object, kind: type[_Kind]) -> dict[str, _Kind]:
    """Returns attribute -> object of a class, also for objects in short lists and dicts."""
    # TensorFlow's list of what is tracked has the same objects under other names.
    names = [name for name in vars(owner) if not name.startswith("_self_")]
    waiting = [(name, vars(owner)[name]) for name in reversed(names)]
    matches: dict[str, _Kind] = {}
    seen: set[int] = set()
    while waiting:
        name, value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, kind):
            matches[name] = value
        elif isinstance(value, dict | list | tuple) and len(value) <= _SHORT:
            inside = value.items() if isinstance(value, dict) else enumerate(value)
            waiting += reversed([(f"{name}.{key}", item) for key, item in inside])
    return matches


def optimizers_of(model: keras.Model) -> dict[str, keras.optimizers.Optimizer]:
    """Returns attribute -> optimizer, of a model and of the models inside it."""
    models = [layer for layer in flat_layers(model) if isinstance(layer, keras.Model)]
    optimizers: dict[int, tuple[str, keras.optimizers.Optimizer]] = {}
    for number, inner in enumerate(models):  # the first one is the model itself
        place = f"models.{number}." if number else ""
        for name, optimizer in attributes_of(inner, keras.optimizers.Optimizer).items():
            optimizers.setdefault(id(optimizer), (place + name, optimizer))
    return dict(optimizers.values())


def with_inner_optimizers(
    optimizer: keras.optimizers.Optimizer,
) -> list[keras.optimizers.Optimizer]:
    """Returns an optimizer and the optimizers inside it, as of loss scaling and lookahead."""
    held = attributes_of(optimizer, keras.optimizers.Optimizer).values()
    inner = [inner for direct in held for inner in with_inner_optimizers(direct)]
    return list({id(item): item for item in (optimizer, *inner)}.values())
