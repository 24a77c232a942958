"""Updates of the rows of a table that a batch has used, instead of the whole table.

The gradient of a lookup holds only rows, but Keras's optimizers compute on whole variables. Here an
optimizer's own update gets the rows in place of the table and of its slots, and what it writes to
them is written to the table.

Updating only rows changes no number if the optimizer leaves rows without a gradient unchanged, as
Adagrad does. It changes the training, and must be asked for, if slots decay in each step, as those
of Adam do. It is impossible if the update of a row depends on other rows. `way_of` decides.

If an optimizer must update all rows of a large table, it updates one block of rows after another.
Temporary values then need the memory of a block, not of the table. Tables with a copy on each
replica are still updated whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import keras
import tensorflow as tf

from tfdist_ext.errors import TrainingError, address_of
from tfdist_ext.placement.live._keras_private import optimizer_behind
from tfdist_ext.placement.live._tf_private import piece_being_updated
from tfdist_ext.placement.live.creating import is_partitioned
from tfdist_ext.placement.live.learning import updates_by_row
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


def way_of(optimizer: keras.optimizers.Optimizer, *, lazy: bool, in_place: bool) -> Way:
    """Returns how an optimizer updates a table.

    Args:
        lazy: rows without a gradient may rest although the optimizer would change them.
        in_place: replicas share the table, or it is on servers.

    Raises:
        TrainingError: `lazy` is True, and the optimizer is not known to update each row alone.
    """
    if optimizer.weight_decay is None and type(optimizer) is keras.optimizers.Adagrad:
        return "rows"
    if not _has_slots(optimizer) and (optimizer.weight_decay is None or not lazy):
        return "whole"  # Keras itself writes rows
    if not updates_by_row(optimizer):
        if lazy:
            raise _no_rows(f"{type(optimizer).__name__} is not known to do so")
        return "whole"
    if lazy:
        return "lazy rows"
    return "blocks" if in_place else "whole"


def _has_slots(optimizer: keras.optimizers.Optimizer) -> bool:
    return type(optimizer) is not keras.optimizers.SGD or bool(optimizer.momentum)


def _no_rows(why: str) -> TrainingError:
    return TrainingError(
        f"lazy_updates=True needs an optimizer that updates each row alone, and {why}. Use another"
        " optimizer, such as Adam or Adagrad, or leave lazy_updates out. If update_step of your own"
        " optimizer computes element by element, set updates_by_row = True in its class."
    )


class RowUpdates(Updates):
    """Gives updates the rows of tables.

    Args:
        inner: updates a variable on its device: an object with `extended.update`.
        optimizers: an optimizer and those inside it.
        lazy: as `distribute` takes `lazy_updates`.

    Raises:
        TrainingError: the updates are lazy, and an optimizer accumulates gradients.
    """

    def __init__(self, inner: Any, optimizers: Sequence[keras.optimizers.Optimizer], lazy: bool):
        self._inner = inner
        self._optimizer = optimizers[-1]
        self._slots = {id(slot) for optimizer in optimizers for slot in optimizer.variables}
        self._lazy = lazy
        self._decays: dict[str, Callable[[Any], object]] = {}  # waiting for the update, by key
        if lazy and any(opt.gradient_accumulation_steps for opt in optimizers):
            raise TrainingError(
                "lazy_updates=True updates the rows of each batch, but"
                " gradient_accumulation_steps sums gradients of whole tables. Use one of them."
            )

    def update(
        self, var: Any, fn: Callable[..., Any], args: Sequence[Any] = (), group: bool = True
    ) -> Any:
        """Call `fn(variable, *args)` on the variable's device, with rows in place of a table."""
        if not args and self._lazy:  # the weight decay, before the update
            self._decays[key_of(var)] = fn
            return None
        decay = self._decays.pop(key_of(var), None)
        update: Callable[..., object] = fn
        if decay is not None:

            def update(var: Any, *args: Any) -> None:
                decay(var)
                fn(var, *args)

        optimizer = optimizer_behind(fn)
        if optimizer is not None and len(args) == 2 and isinstance(args[0], tf.IndexedSlices):
            in_place = isinstance(self._inner, UpdatesInPlace)
            way = way_of(optimizer, lazy=self._lazy, in_place=in_place)
            if way in ("blocks", "whole"):
                _warn_of_large(optimizer, var)
            if way != "whole":

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
            name = type(self._optimizer).__name__
            raise _no_rows(f"{name} decays a table that it does not update by update_step")

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
            has_rows = tuple(variable.shape[:1]) == tuple(table.shape[:1])
            if id(variable) not in self._slots or not has_rows:
                return value
            if id(variable) not in views:
                views[id(variable)] = RowsOfVariable(value, ids)
            return views[id(variable)]

        with _WithRows(rows_of, outer):
            update(RowsOfVariable(table, ids), gradient, rate)


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


class _WithRows(keras.StatelessScope):
    """Scope in which slots are read and written as rows.

    Args:
        value_of: rows of a slot, or the value of another variable.
        outer: the scope of the other variables.
    """

    def __init__(self, value_of: Callable[[keras.Variable], Any], outer: keras.StatelessScope):
        super().__init__(initialize_variables=False)
        self._value_of, self._outer = value_of, outer

    def get_current_value(self, variable: keras.Variable) -> Any:
        return self._value_of(variable)

    def add_update(self, update: tuple[keras.Variable, tf.Tensor]) -> None:
        variable, value = update
        part = self._value_of(variable)
        if isinstance(part, PartOfVariable):
            part.assign(value)
        else:
            self._outer.add_update((variable, value))


def _warn_of_large(optimizer: keras.optimizers.Optimizer, table: Any) -> None:
    """Warns if each step updates all rows of a large table."""
    size = math.prod(table.shape) * tf.as_dtype(table.dtype).size
    if size >= _LARGE and _has_slots(optimizer):
        warn(
            f"each step updates all {table.shape[0]} rows of {table.name} ({size_text(size)}), and"
            f" the optimizer's slots for them, because {type(optimizer).__name__} also changes rows"
            " that a batch does not use. tfd.distribute(..., lazy_updates=True) updates the rows of"
            f" a batch only; see {address_of('docs/parameter_servers.md#optimizers-and-memory')}"
        )
