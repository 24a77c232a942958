"""What one replica's step writes, collected instead of done.

Keras writes metrics and moving statistics from inside each replica's step. Under a strategy these
writes are slow (a cross-replica operation each), and with some strategies wrong. Here they become
values of the step: metrics stay in the loop until it ends, moving statistics are averaged and
written once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist_ext.errors import TrainingError
from tfdist_ext.training import _keras_private as kp
from tfdist_ext.training.part import current_graph

__all__ = ["ReplicaScope", "metric_variables_on_one_copy"]


class ReplicaScope(keras.StatelessScope):
    """Holds the metrics' state and collects writes to `watched`; lets other writes through."""

    def __init__(self, metrics: Iterable[tuple[Any, Any]], watched: Sequence[Any] = ()):
        super().__init__(metrics, collect_losses=True, initialize_variables=False)
        self._metrics = set(self.state_mapping)
        self._watched = {id(variable): number for number, variable in enumerate(watched)}
        self._graph = current_graph()
        self.updated: set[int] = set()  # ids of the metrics' variables that were written

    def add_update(self, update: tuple[Any, Any]) -> None:
        variable, value = update
        key = id(variable)
        if key not in self._metrics and key not in self._watched:
            _write(variable, value)
        elif current_graph() is self._graph:
            self.updated |= {key} & self._metrics
            super().add_update(update)
        elif key in self._watched:
            # Inside a cond or a loop of the layer's own: its value cannot leave it.
            _write(variable, value)
        else:
            raise TrainingError(
                f"the metric variable {variable.path!r} is updated inside a tf.function, a cond or"
                " a loop of train_step's own. Update metrics directly in the body of train_step;"
                " the step is compiled as a whole already."
            )

    def get_current_value(self, variable: Any) -> Any:
        # Never None: Keras reads regularized weights through the scope.
        value = self.state_mapping.get(id(variable))
        return kp.raw_value(variable) if value is None else value

    @property
    def written(self) -> dict[int, Any]:
        """Number of a watched variable -> the value that the step gave it."""
        return {
            number: self.state_mapping[key]
            for key, number in self._watched.items()
            if key in self.state_mapping
        }


def metric_variables_on_one_copy() -> Any:
    """Scope in which metrics' variables are ordinary mirrored ones.

    Keras creates them to be summed over replicas when read. Reading such a variable is a
    collective, so a callback that looks at a metric on the chief alone would wait for ever. The
    replicas' own states are in the loop; the variable only shows their aggregate.
    """

    def creator(next_creator: Any, **kwargs: Any) -> Any:
        if kwargs.get("synchronization") == tf.VariableSynchronization.ON_READ:
            kwargs["synchronization"] = tf.VariableSynchronization.AUTO
            kwargs["aggregation"] = tf.VariableAggregation.ONLY_FIRST_REPLICA
        return next_creator(**kwargs)

    return tf.variable_creator_scope(creator)


def _write(variable: Any, value: Any) -> None:
    """Assign at once, as some layers do to weights that they read in the same call."""
    raw = kp.raw_value(variable)
    if isinstance(raw, tf.distribute.DistributedValues) or not hasattr(raw, "get"):
        kp.write(variable, value)
    else:  # the one copy of central storage, in a wrapper that asks how replicas combine
        raw.get().assign(tf.cast(value, raw.dtype))
