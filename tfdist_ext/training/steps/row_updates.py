"""Updates of the rows of a table that a batch has used, instead of the whole table.

The gradient of a lookup holds only rows, but Keras's optimizers compute on whole variables. Here an
optimizer's own update gets the rows in place of the table and of its slots, and what it writes to
them is written to the table.

Updating only rows changes no number if the optimizer leaves rows without a gradient unchanged, as
Adagrad does. It changes the training, and must be asked for, if slots decay in each step, as those
of Adam do. It is impossible if the update of a row depends on other rows. `_Trial` tries the update
of an optimizer on a small table to find out which of the three is true.

If an optimizer must update all rows of a large table, it updates one block of rows after another.
Temporary values then need the memory of a block, not of the table. Tables with a copy on each
replica are still updated whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from tfdist_ext.errors import TrainingError, address_of
from tfdist_ext.placement.live._tf_private import piece_being_updated
from tfdist_ext.placement.live.creating import is_partitioned
from tfdist_ext.placement.specs import size_text
from tfdist_ext.training._keras_private import key_of, stateless_scope
from tfdist_ext.training.variables import PartOfVariable, Updates, UpdatesInPlace
from tfdist_ext.user_frames import warn

# The update of a variable: (variable, gradient, learning rate).
Update: TypeAlias = Callable[[Any, Any, Any], object]

# What a gradient in slices updates: the whole table at once; all rows of it, in blocks; its own
# rows, which changes no number; or its own rows with the slices of a row summed first, so that rows
# without a gradient rest.
Way: TypeAlias = Literal["whole", "blocks", "rows", "lazy rows"]

_LARGE = 100_000_000  # bytes of a table
UPDATE_BLOCK_BYTES = 1 << 22  # of a table; one of less than 8 blocks is updated whole


@dataclass
class RowRules:
    """How the tables of a model are updated, found out once for each.

    Attributes:
        lazy: rows without a gradient may rest although the optimizer would change them.
        ways: by the key of a table.
    """

    lazy: bool = False
    ways: dict[str, Way] = field(default_factory=dict)


class RowUpdates(Updates):
    """Gives updates the rows of tables.

    Args:
        inner: updates a variable on its device: an object with `extended.update`.
        optimizers: an optimizer and those inside it.
        rules: of the model.

    Raises:
        TrainingError: the rules are lazy, and an optimizer accumulates gradients.
    """

    def __init__(
        self, inner: Any, optimizers: Sequence[keras.optimizers.Optimizer], rules: RowRules
    ):
        self._inner = inner
        self._optimizer = optimizers[-1]
        self._slots = {id(slot) for optimizer in optimizers for slot in optimizer.variables}
        self._rules = rules
        self._decays: dict[str, Callable[[Any], object]] = {}  # waiting for the update, by key
        self._may_rest = rules.lazy or all(opt.weight_decay is None for opt in optimizers)
        if rules.lazy and any(opt.gradient_accumulation_steps for opt in optimizers):
            raise TrainingError(
                "lazy_updates=True updates the rows of each batch, but"
                " gradient_accumulation_steps sums gradients of whole tables. Use one of them."
            )

    def update(
        self, var: Any, fn: Callable[..., Any], args: Sequence[Any] = (), group: bool = True
    ) -> Any:
        """Call `fn(variable, *args)` on the variable's device, with rows in place of a table."""
        key = key_of(var)
        if not args and self._rules.lazy:  # the weight decay, before the update
            self._decays[key] = fn
            return None
        decay = self._decays.pop(key, None)
        update: Callable[..., object] = fn
        if decay is not None:

            def update(var: Any, *args: Any) -> None:
                decay(var)
                fn(var, *args)

        if len(args) == 2 and isinstance(args[0], tf.IndexedSlices):
            if key not in self._rules.ways:
                self._rules.ways[key] = self._way(var, update)
            if (way := self._rules.ways[key]) != "whole":

                def of_rows(var: Any, gradient: tf.IndexedSlices, rate: Any) -> None:
                    if way == "blocks":
                        self._update_blocks(update, var, gradient, rate)
                    else:
                        self._update_slices(update, var, gradient, rate, summed=way == "lazy rows")

                return self._inner.extended.update(var, of_rows, args=args, group=group)
        return self._inner.extended.update(var, update, args=args, group=group)

    def check_decays(self) -> None:
        """Check, at the end of a step's update, that no weight decay waits for its update.

        Raises:
            TrainingError: the optimizer has an update of its own.
        """
        if self._decays:
            raise self._no_rows("it decays weights whose update Keras does not call")

    def _way(self, table: Any, update: Update) -> Way:
        """How a table is updated."""
        in_place = isinstance(self._inner, UpdatesInPlace)
        trial = _Trial(table, update, self._slots, alone=in_place or self._rules.lazy)
        if self._may_rest and trial.way == "rows":
            return "rows" if trial.slots else "whole"  # without slots, Keras writes rows itself
        if self._rules.lazy:
            if trial.way == "whole":
                raise self._no_rows(trial.why)
            return "lazy rows"
        size = math.prod(table.shape) * tf.as_dtype(table.dtype).size
        if size >= _LARGE and trial.slots:
            warn(
                f"each step updates all {table.shape[0]} rows of {table.name}"
                f" ({size_text(size)}), and {trial.slots} times as many of the optimizer, because"
                f" {type(self._optimizer).__name__} also changes rows that a batch does not use."
                " tfd.distribute(..., lazy_updates=True) updates the rows of a batch only; see"
                f" {address_of('docs/parameter_servers.md#optimizers-and-memory')}"
            )
        return "blocks" if in_place and trial.slots and trial.way != "whole" else "whole"

    def _no_rows(self, why: str) -> TrainingError:
        return TrainingError(
            f"lazy_updates=True needs an optimizer that updates each row alone, but"
            f" {type(self._optimizer).__name__} does not: {why}. Use another optimizer, such as"
            " Adam or Adagrad, or leave lazy_updates out."
        )

    def _update_blocks(
        self, update: Update, table: Any, gradient: tf.IndexedSlices, rate: Any
    ) -> None:
        """Update all rows of one piece of a table, one block after the other."""
        rows, *width = piece_being_updated(table).shape
        count = max(1, UPDATE_BLOCK_BYTES // (math.prod(width) * tf.as_dtype(table.dtype).size))
        if rows < 8 * count:
            update(table, gradient, rate)
            return
        indices = tf.cast(gradient.indices, tf.int64)

        def update_block(start: tf.Tensor) -> list[tf.Tensor]:
            stop = tf.minimum(start + count, rows)
            inside = tf.where((indices >= start) & (indices < stop))[:, 0]
            block = tf.IndexedSlices(
                tf.gather(gradient.values, inside),
                tf.gather(indices, inside) - start,
                tf.stack([stop - start, *width]),
            )
            self._update_rows(update, table, tf.range(start, stop), block, rate)
            return [stop]

        first = tf.zeros([], tf.int64)
        tf.while_loop(lambda start: start < rows, update_block, [first], parallel_iterations=1)

    def _update_slices(
        self, update: Update, table: Any, gradient: tf.IndexedSlices, rate: Any, *, summed: bool
    ) -> None:
        """Update those rows of one piece of a table that have a gradient."""
        ids, positions = tf.unique(gradient.indices)
        values: Any = gradient.values
        if summed:
            values = tf.math.unsorted_segment_sum(values, positions, tf.size(ids))
        else:  # Keras squares the slices of a row one by one
            shape = tf.concat([[tf.size(ids)], tf.shape(values)[1:]], 0)
            values = tf.IndexedSlices(values, positions, shape)
        self._update_rows(update, table, ids, values, rate)

    def _update_rows(
        self, update: Update, table: Any, ids: tf.Tensor, gradient: Any, rate: Any
    ) -> None:
        """Call an update with rows in place of one piece of a table and of its slots."""
        outer = stateless_scope()
        assert outer is not None, "a step's update runs in a scope"
        views: dict[int, RowsOfVariable] = {}

        def rows_of(variable: keras.Variable) -> Any:
            value = outer.get_current_value(variable)
            if id(variable) not in self._slots or not _has_rows_of(variable, table):
                return value
            if id(variable) not in views:
                views[id(variable)] = RowsOfVariable(value, ids)
            return views[id(variable)]

        with _Instead(rows_of, outer):
            update(RowsOfVariable(table, ids), gradient, rate)


def _has_rows_of(slot: keras.Variable, table: Any) -> bool:
    return len(slot.shape) > 0 and slot.shape[0] == table.shape[0]


class RowsOfVariable(PartOfVariable):
    """Rows of a variable, or of the piece that is being updated.

    Args:
        ids: of the rows, each once.
    """

    def __init__(self, variable: Any, ids: tf.Tensor):
        super().__init__(variable, tf.TensorShape([None, *variable.shape[1:]]))
        self._variable, self._ids = piece_being_updated(variable), ids

    def read_value(self) -> tf.Tensor:
        if self.value is None:
            lookup = tf.nn.embedding_lookup if is_partitioned(self._variable) else tf.gather
            self.value = lookup(self._variable, self._ids)
        return self.value

    def assign(self, value: Any) -> None:
        super().assign(value)
        self._variable.scatter_update(tf.IndexedSlices(self.value, self._ids))

    def assign_add(self, value: Any) -> None:
        """Add to the rows. On a server, what other workers add at the same time is kept."""
        value = tf.cast(value, self.dtype)
        if self.value is not None:
            self.value += value
        self._variable.scatter_add(tf.IndexedSlices(value, self._ids))

    def assign_sub(self, value: Any) -> None:
        self.assign_add(-value)

    def scatter_add(self, slices: tf.IndexedSlices) -> None:
        self.value = None
        ids = tf.gather(self._ids, slices.indices)
        self._variable.scatter_add(tf.IndexedSlices(slices.values, ids))


class _Instead(keras.StatelessScope):
    """Scope in which Keras variables have other values.

    Args:
        value_of: the value of a variable.
        outer: the scope of variables whose value is no part; None if writing to them does nothing.
    """

    def __init__(
        self, value_of: Callable[[keras.Variable], Any], outer: keras.StatelessScope | None
    ):
        super().__init__(initialize_variables=False)
        self._value_of, self._outer = value_of, outer

    def get_current_value(self, variable: keras.Variable) -> Any:
        return self._value_of(variable)

    def add_update(self, update: tuple[keras.Variable, tf.Tensor]) -> None:
        variable, value = update
        part = self._value_of(variable)
        if isinstance(part, PartOfVariable):
            part.assign(value)
        elif self._outer is not None:
            self._outer.add_update((variable, value))


class _Trial:
    """An update, tried on a table of five rows with invented values.

    Attributes:
        way: "rows" if it does nothing to rows without a gradient; "lazy rows" if the update of a
            row depends on this row alone (tried only if `alone`); else "whole".
        why: why it is "whole".
        slots: how many slots the update has used.
    """

    def __init__(self, table: Any, update: Update, of_optimizer: Container[int], *, alone: bool):
        self._table = table
        self._update = update
        self._of_optimizer = of_optimizer
        self._random = np.random.default_rng(0)
        self._start: dict[int, np.ndarray] = {}  # of the table, and of slots, by id
        self.why = ""
        self.way: Way = "whole"
        if self._holds(self._others_rest):
            self.way = "rows"
        elif alone and self._holds(self._each_alone):
            self.way = "lazy rows"
        self.slots = len(self._start) - 1

    def _holds(self, condition: Callable[[], tf.Tensor]) -> bool:
        """Whether a condition holds, computed in a graph that shares nothing with this process."""
        with tf.init_scope(), tf.device("CPU:0"):
            try:
                graph = tf.function(condition, autograph=False).get_concrete_function()
                if graph.captured_inputs:
                    raise TrainingError("it uses a tf.Variable or a tensor of its own")
                self.why = "the update of a row depends on other rows"
                return bool(graph())
            except Exception as error:  # what the code of an optimizer raises
                self.why = str(error).strip().split("\n")[0]
                return False

    def _others_rest(self) -> tf.Tensor:
        """In a graph: whether slices change only their rows, as they change these rows alone."""
        width = list(self._table.shape[1:])
        values = tf.constant(self._values([3, *width]), self._table.dtype)
        shapes = tf.constant([[5, *width], [2, *width]])
        whole = self._after(_ALL, tf.IndexedSlices(values, tf.constant([3, 1, 3]), shapes[0]))
        rows = self._after(_USED, tf.IndexedSlices(values, tf.constant([0, 1, 0]), shapes[1]))
        rest = [
            tf.gather(value, _REST) == tf.constant(self._start[key][_REST], value.dtype)
            for key, value in whole.items()
        ]
        return tf.reduce_all([_are_close(whole, rows), *map(tf.reduce_all, rest)])

    def _each_alone(self) -> tf.Tensor:
        """In a graph: whether a gradient changes rows as it changes them without the others."""
        gradient = self._values([5, *self._table.shape[1:]])
        whole = self._after(_ALL, tf.constant(gradient, self._table.dtype))
        rows = self._after(_USED, tf.constant(gradient[_USED], self._table.dtype))
        return _are_close(whole, rows)

    def _after(self, rows: list[int], gradient: Any) -> dict[int, tf.Tensor]:
        """The values of these rows of the table and of its slots, by id, after an update."""
        parts: dict[int, PartOfVariable] = {}

        def part(key: int, variable: Any) -> PartOfVariable:
            if key not in parts:
                start = self._start.setdefault(key, self._values((5, *variable.shape[1:])))
                parts[key] = PartOfVariable(variable)
                parts[key].value = tf.constant(start[rows], variable.dtype)
            return parts[key]

        def invented(variable: keras.Variable) -> Any:
            if id(variable) in self._of_optimizer and _has_rows_of(variable, self._table):
                return part(id(variable), variable)
            if len(variable.shape):
                raise TrainingError(f"it uses {variable.path}, which has no row for each row")
            return tf.cast(3.0 if "int" in variable.dtype else 0.5, variable.dtype)

        with _Instead(invented, None):
            self._update(part(0, self._table), gradient, tf.constant(0.5, self._table.dtype))
        return {key: part.read_value() for key, part in parts.items()}

    def _values(self, shape: Sequence[int]) -> np.ndarray:
        return self._random.uniform(0.5, 0.7, shape)  # mean squares are above squared means


_ALL, _USED, _REST = [0, 1, 2, 3, 4], [3, 1], [0, 2, 4]  # rows of a trial


def _are_close(whole: dict[int, tf.Tensor], rows: dict[int, tf.Tensor]) -> tf.Tensor:
    """Whether the used rows of whole tensors are equal to `rows` but for rounding."""
    results = []
    for key, value in whole.items():
        epsilon = {2: 2e-2, 4: 1e-6}.get(value.dtype.size, 1e-13)
        a, b = tf.cast(tf.gather(value, _USED), tf.float64), tf.cast(rows[key], tf.float64)
        results.append(tf.reduce_all(tf.abs(a - b) <= epsilon * tf.abs(a)))
    return tf.reduce_all(results)
