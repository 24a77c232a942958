"""Keras code on one replica's own copies of the variables, as if there were no strategy.

What an optimizer does after gradients are summed is the same on every replica. Inside a strategy
its conditions fail (a cond cannot contain a cross-replica call) and its assignments take detours.
On the plain tf.Variables that lie behind the distributed ones, Keras's code runs as on one device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import keras
import tensorflow as tf

from tfdist_ext.placement.live.creating import is_partitioned, pieces_of
from tfdist_ext.placement.live.updates import updates_by_row, with_each_piece
from tfdist_ext.strategies import StrategyTemplate
from tfdist_ext.strategies.template_checks import check_owner
from tfdist_ext.training import _keras_private as kp
from tfdist_ext.training.partitioned import UpdatesVariables

__all__ = [
    "LocalCopies",
    "UpdatesInPlace",
    "copies_per_worker",
    "device_of_update",
    "is_updated_once",
    "local_copy",
    "outside_of_strategies",
    "owner_copy",
    "send_out",
]


class LocalCopies(keras.StatelessScope):
    """Scope in which each Keras variable is a plain tf.Variable, read and assigned at once.

    Args:
        copy_of: Keras variable -> the plain variable to use for it, which may be in pieces.
    """

    def __init__(self, copy_of: Callable[[Any], Any]):
        super().__init__(initialize_variables=False)
        self._copy_of = copy_of
        self._piece: int | None = None
        self._used: dict[int, Any] = {}

    @property
    def used(self) -> list[Any]:
        """The Keras variables that were read or assigned."""
        return list(self._used.values())

    def get_current_value(self, variable: Any) -> Any:
        self._used[id(variable)] = variable
        copy = self._copy_of(variable)
        if self._piece is None or not is_partitioned(copy):
            return copy
        return copy.variables[self._piece]

    def add_update(self, update: tuple[Any, Any]) -> None:
        variable, value = update
        copy = self.get_current_value(variable)
        copy.assign(tf.cast(value, copy.dtype))

    @contextlib.contextmanager
    def as_piece(self, number: int) -> Iterator[None]:
        """Scope in which variables in pieces are their pieces of this number."""
        before, self._piece = self._piece, number
        try:
            yield
        finally:
            self._piece = before


class UpdatesInPlace(UpdatesVariables):
    """Each update is computed where the variable is.

    One in pieces is updated piece by piece where the optimizer works row by row, else as a whole.

    Args:
        copies: the scope in which the optimizer runs.
    """

    def __init__(self, optimizer: Any, copies: LocalCopies):
        self._by_row = updates_by_row(optimizer)
        self._copies = copies
        self._wholes: dict[int, Any] = {}  # id of a piece -> what it is a piece of

    def key_of(self, original: Callable[..., Any], optimizer: Any, variable: Any) -> Any:
        """An optimizer's key of a variable; of a piece, that of the variable it belongs to."""
        raw = kp.raw_value(variable) if isinstance(variable, keras.Variable) else variable
        return original(optimizer, self._wholes.get(id(raw), raw))

    def run(self, var: Any, fn: Callable[..., Any], args: Sequence[Any]) -> None:
        """Call `fn(variable, *args)` on the variable's device, or for each piece on that one's."""
        if is_partitioned(var) and self._by_row:
            for number, piece, mine in with_each_piece(var, args):
                self._wholes[id(piece)] = var
                with tf.device(piece.device), self._copies.as_piece(number):
                    fn(piece, *mine)
            return
        with tf.device(device_of_update(var)):
            fn(var, *args)


def device_of_update(copy: Any) -> str:
    """Where an update of a plain variable as a whole is computed; of one in pieces at the first."""
    device: str = pieces_of(copy)[0][0].device
    return device


def copies_per_worker(variable: Any, strategy: tf.distribute.Strategy) -> int:
    """How many copies of a Keras variable the strategy keeps on this worker."""
    return len(strategy.experimental_local_results(kp.raw_value(variable)))


def local_copy(variable: Any, strategy: tf.distribute.Strategy, number: int) -> Any:
    """The plain tf.Variable that is a Keras variable's copy of the given number.

    Of one in pieces, the ShardedVariable of plain pieces.
    """
    copies = strategy.experimental_local_results(kp.raw_value(variable))
    copy = copies[number % len(copies)]
    # One copy for all replicas comes in a wrapper that insists on its strategy.
    return copy.get() if hasattr(copy, "get") else copy


def owner_copy(variable: Any, strategy: tf.distribute.Strategy) -> Any:
    """The plain tf.Variable on which an update that is computed once is computed."""
    number = 0
    if isinstance(strategy, StrategyTemplate):
        raw = kp.raw_value(variable)
        number = check_owner(strategy, strategy.owner(raw), raw)
    return local_copy(variable, strategy, number)


def is_updated_once(
    variables: Sequence[Any], strategy: tf.distribute.Strategy, local_replicas: int
) -> bool:
    """Whether an update is computed once, and not by each replica on copies of its own.

    So it is where replicas share a copy, which would be updated once for each of them, and where
    the strategy has its own way of applying updates.
    """
    if isinstance(strategy, StrategyTemplate) and strategy.has_own_updates:
        return True
    return any(copies_per_worker(variable, strategy) < local_replicas for variable in variables)


def send_out(variables: Sequence[Any], strategy: tf.distribute.Strategy) -> None:
    """Give all copies the value of the owner's; to be called in cross-replica context."""
    for variable in variables:
        if copies_per_worker(variable, strategy) > 1:
            _send_out(kp.raw_value(variable), owner_copy(variable, strategy), strategy)


def _send_out(raw: Any, source: Any, strategy: tf.distribute.Strategy) -> None:
    def take(copy: Any, value: Any) -> None:
        if copy is not source:
            copy.assign(value)

    with tf.device(source.device):
        value = source.read_value()
    strategy.extended.update(raw, take, args=(value,), group=False)


@contextlib.contextmanager
def outside_of_strategies(optimizers: Sequence[Any] = (), updates: Any = None) -> Iterator[None]:
    """Scope in which TensorFlow, Keras and the given optimizers see no strategy.

    Args:
        updates: what the optimizers see instead.
    """
    instead = _default_context().strategy if updates is None else updates
    with _default_context(), kp.distribution_strategy_of(optimizers, instead):
        yield


_context: Any = None


def _default_context() -> Any:
    """TensorFlow's replica context where no strategy is used."""
    global _context
    if _context is None:
        # A new thread is outside of all scopes, whatever is open in this one.
        with ThreadPoolExecutor(1) as thread:
            _context = thread.submit(tf.distribute.get_replica_context).result()
    return _context
