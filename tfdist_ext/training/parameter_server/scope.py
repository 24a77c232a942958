"""Variables as a step on a worker of a parameter server cluster sees and writes them.

The values are on parameter servers, and other workers write them at the same time. So a counter is
added to and never overwritten with a value computed from an old one. Updates run on the server of
the variable.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist_ext.training._keras_private import (
    distribution_strategy_of,
    raw_value,
    substitutes,
)
from tfdist_ext.training.steps.row_updates import RowUpdates
from tfdist_ext.training.steps.scope import (
    StepScope,
    metric_in_inner_graph,
    recording_results,
    take,
)
from tfdist_ext.training.variables import (
    UpdatesInPlace,
    optimizers_of,
    with_inner_optimizers,
)


class WorkerScope(StepScope):
    """Scope of one step.

    Args:
        values: (variable, value) of variables that are local to the step: metrics, and the number
            of the step. Writing to one of them changes only this value.
        watched: variables that the step reads once, and may write (moving statistics, seeds,
            learning rates). What the step adds to them is added on the server at the end of it.
        counter: the variable of `values` that counts steps. The scope counts its writes.
    """

    def __init__(
        self,
        values: Iterable[tuple[keras.Variable, tf.Tensor]],
        watched: Sequence[keras.Variable] = (),
        counter: keras.Variable | None = None,
    ):
        super().__init__(values)
        self._counter = counter
        self.counted = 0
        self._values = set(self.state_mapping)
        self._watched = {id(variable): variable for variable in watched}
        self._before: dict[int, tf.Tensor] = {}  # of watched variables that were read

    def get_current_value(self, variable: keras.Variable) -> Any:
        key = id(variable)
        if key in self.state_mapping:
            return self.state_mapping[key]
        raw = raw_value(variable)
        if raw is None:
            return None
        if key in self._watched and not self._in_inner_graph():
            # A tensor, because `write_watched` subtracts what was read from what was written.
            self._before[key] = self.state_mapping[key] = tf.convert_to_tensor(raw)
            return self.state_mapping[key]
        return raw

    def add_update(self, update: tuple[keras.Variable, tf.Tensor]) -> None:
        variable, value = update
        key, in_step = id(variable), not self._in_inner_graph()
        self.counted += variable is self._counter
        if in_step and key in self._watched:
            self.get_current_value(variable)  # reads the value before the step
        if in_step and key in self.state_mapping:
            self.updated |= {key} & self._values
            super().add_update((variable, value))
        elif key not in self._values:
            raw = raw_value(variable)  # acts as the piece that is updated
            _add_difference(raw, value, tf.convert_to_tensor(raw))
        elif variable is not self._counter:  # in a cond of the optimizer the number stays
            raise metric_in_inner_graph(variable)

    def write_watched(self) -> None:
        """Add what the step has added to watched variables to the servers' variables."""
        for key, before in self._before.items():
            after = self.state_mapping[key]
            if after is not before:
                _add_difference(raw_value(self._watched[key]), after, before)

    def rows(self, variable: keras.Variable, ids: tf.Tensor) -> tf.Tensor | None:
        """Rows of a table, gathered on its servers; None if the step has read or written it."""
        if id(variable) in self.state_mapping:
            return None
        return tf.nn.embedding_lookup(raw_value(variable), ids)


@contextlib.contextmanager
def step_on_worker(
    scope: WorkerScope, model: keras.Model, *, lazy_updates: bool = False
) -> Iterator[None]:
    """The scope of a step that reads rows and updates variables on their servers."""
    updates: list[RowUpdates] = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(scope)
        stack.enter_context(substitutes({take: _take, **recording_results(model)}))
        for optimizer in optimizers_of(model).values():
            every = with_inner_optimizers(optimizer)
            updates.append(RowUpdates(UpdatesInPlace(optimizer), every, lazy_updates))
            stack.enter_context(distribution_strategy_of(every, updates[-1]))
        yield
        for update in updates:
            update.check_decays()


def _take(
    original: Callable[..., tf.Tensor], x: Any, indices: Any, axis: int | None = None
) -> tf.Tensor | tf.RaggedTensor:
    if isinstance(indices, tf.SparseTensor):  # Keras also takes row 0 for missing entries
        indices = tf.sparse.to_dense(indices)
    return take.function(None, original, x, indices, axis)


def _add_difference(raw: tf.Variable, after: tf.Tensor, before: tf.Tensor) -> None:
    new, old = tf.cast(after, raw.dtype), tf.cast(before, raw.dtype)
    if raw.dtype.is_floating or raw.dtype.is_integer:
        raw.assign_add(new - old)
    else:
        raw.assign(new)
