"""What one replica's step writes, collected instead of done.

Keras writes metrics and moving statistics from inside each replica's step. Under a strategy these
writes are slow (a cross-replica operation each), and with some strategies wrong. Here they become
values of the step: metrics stay in the loop until it ends, moving statistics are averaged and
written once.

What is written inside a `cond` or a loop of a layer's own cannot leave it as a value. It goes to
the replica's own copy of the variable, which is read when the step ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from typing import Any

import keras
import tensorflow as tf

from tfdist_ext.errors import TrainingError
from tfdist_ext.placement.live.creating import is_partitioned
from tfdist_ext.training import _keras_private as kp
from tfdist_ext.training.derived_logs import MetricVersions
from tfdist_ext.training.logs import metric_variables, metrics_of
from tfdist_ext.training.own_copies import OwnCopies
from tfdist_ext.training.part import Part, current_graph, outside_of_inner_graphs, part
from tfdist_ext.training.partitioned import PartitionedRead, take_rows
from tfdist_ext.training.passed import StepRecord

__all__ = [
    "ReplicaScope",
    "assign_written",
    "metric_variables_on_one_copy",
    "metrics_and_others",
]


class ReplicaScope(keras.StatelessScope):
    """Holds the metrics' state and collects writes to the model's other variables.

    Args:
        metrics: (variable, value) of each metric's variable.
        watched: the model's other variables. What a replica writes to them becomes the mean over
            all rows: when the step ends, or at once for those that an optimizer trains.
        own: where the replica keeps what is written in inner graphs.
    """

    def __init__(
        self,
        metrics: Iterable[tuple[Any, Any]],
        watched: Sequence[Any] = (),
        own: OwnCopies | None = None,
    ):
        metrics = list(metrics)
        super().__init__(metrics, collect_losses=True, initialize_variables=False)
        self._metrics = {id(variable): variable for variable, _ in metrics}
        self._others = list(watched)
        self.versions = MetricVersions()
        for variable, _ in metrics:
            key = id(variable)
            self.state_mapping[key] = self.versions.add(variable, self.state_mapping[key])
        self.without_rows = dict(self.state_mapping)  # what the states are if this part is empty
        self.resetting = False
        self.results: list[Any] = []  # what metrics returned in eager steps
        self._watched = {id(variable): number for number, variable in enumerate(watched)}
        self._own = own or OwnCopies(tf.distribute.get_strategy(), 1)
        self._apart: set[int] = set()  # watched variables whose value is in a variable beside them
        self._graph = current_graph()
        self._reads: dict[int, PartitionedRead] = {}
        self.written_apart: set[int] = set()  # ids of others that were written, in no inner graph
        self.updated: set[int] = set()  # ids of the metrics' variables that were written
        for variable in self._own.written.values():
            # Not only when one is met: inner graphs of eager steps are traced in the first alone.
            self._move_to_own(variable)

    def add_update(self, update: tuple[Any, Any]) -> None:
        variable, value = update
        key = id(variable)
        if (here := part()) is not None:
            here.check_written(variable, value)
        if key in self._metrics:
            self._check_metric(variable)
            self.updated.add(key)
            if self.resetting:
                value = self.without_rows[key] = _on_first_replica(variable, value)
            super().add_update((variable, self.versions.add(variable, value)))
        elif key not in self._watched:
            _check_is_no_metric(variable)
            self.written_apart.add(key)
            self._write(variable, value)
        elif self._in_inner_graph():
            self._move_to_own(variable)
            self._own.write(variable, value)
        elif variable.trainable:
            self.written_apart.add(key)
            self._write(variable, value)
        else:
            self.written_apart.add(key)
            super().add_update(update)

    def get_current_value(self, variable: Any) -> Any:
        key = id(variable)
        if key in self._watched and self._in_inner_graph():
            self._move_to_own(variable)  # the graph may be a loop that goes on to write it
        if key in self.state_mapping:
            return self.state_mapping[key]
        # Never None: Keras reads regularized weights through the scope.
        if key in self._apart:
            return self._own.of(variable)
        raw = kp.raw_value(variable)
        if not is_partitioned(raw) or not variable.trainable:
            return raw
        read = self._read_of(raw)
        # Not in a loop of a layer's, whose gradient has the shape of its inputs.
        with outside_of_inner_graphs(self._graph):
            return read.whole()

    def record(self, called: Set[str]) -> StepRecord:
        """What the step has done so far; `called` are keys of `REPLACED`."""
        read_whole = {
            id(variable)
            for variable in self._others
            if (read := self._reads.get(id(kp.raw_value(variable)))) and read.read_whole
        }
        has_losses = bool(self.losses)
        return StepRecord(called, self.written_apart, self.updated, read_whole, has_losses)

    def forget_losses(self, layer: keras.Layer) -> None:
        """Those that a layer, and the layers inside of it, gave to add_loss in this step."""
        for each in kp.flat_layers(layer) if self.losses else ():
            ids = kp.loss_ids(each)
            mine = {id(loss) for loss in self.losses} & ids
            self.losses[:] = [loss for loss in self.losses if id(loss) not in mine]
            ids -= mine

    def rows(self, variable: Any, ids: tf.Tensor) -> Any:
        """The rows of a variable in pieces, moved without the rest of it.

        None in inner graphs, and where the step has given it another value.
        """
        key = id(variable)
        if self._in_inner_graph() or key in self.state_mapping or key in self._apart:
            return None
        raw = kp.raw_value(variable)
        return self._read_of(raw).rows(ids) if variable.trainable else take_rows(raw, ids)

    def source_of(self, variable: Any) -> Any:
        """What a tape knows a variable by: one in pieces is no source, its reads have one."""
        raw = kp.raw_value(variable) if isinstance(variable, keras.Variable) else None
        return self._read_of(raw).handle if is_partitioned(raw) else variable

    def _read_of(self, raw: Any) -> PartitionedRead:
        if id(raw) not in self._reads:
            with outside_of_inner_graphs(self._graph):
                self._reads[id(raw)] = PartitionedRead(raw)
        return self._reads[id(raw)]

    @property
    def written(self) -> dict[int, Any]:
        """Number of a watched variable -> the value that the step gave it, on this replica."""
        values = {
            self._watched[key]: tf.convert_to_tensor(self._own.of(variable))
            for key, variable in self._own.written.items()
        }
        for key, number in self._watched.items():
            if key in self.state_mapping:
                values[number] = self.state_mapping[key]
        return values

    def outcome(self, here: Part | None) -> tuple[list[Any], dict[str, Any]]:
        """What a replica's step returns: (the metrics' states, the values that it wrote).

        To be called in the replica's context, after the scope.

        Returns:
            The state of each metric variable on this replica; and by the number of a watched
            variable, as a string, its new value, equal on all replicas, for `assign_written`.
        """
        states = [self.get_current_value(variable) for variable in self._metrics.values()]
        written = self.written
        if here is not None:
            # A row that is another's must not be added twice.
            states = [
                here.if_present(after, self.without_rows[key])
                if variable.aggregation == "sum"
                else after
                for after, (key, variable) in zip(states, self._metrics.items(), strict=True)
            ]
            written = here.mean(written, dict(enumerate(self._others)))
        return states, {str(number): value for number, value in written.items()}

    def _in_inner_graph(self) -> bool:
        return current_graph() is not self._graph

    def _move_to_own(self, variable: Any) -> None:
        """See to it that the replica's own copy has the value that is current before this graph."""
        key = id(variable)
        collected = self.state_mapping.pop(key, None)
        is_apart = self._own.is_apart(variable)
        if collected is not None or (is_apart and key not in self._apart):
            with outside_of_inner_graphs(self._graph):
                value = kp.raw_value(variable) if collected is None else collected
                self._own.of(variable).assign(value)
        if collected is not None:
            self._own.written[key] = variable
        if is_apart:
            self._apart.add(key)

    def _write(self, variable: Any, value: Any) -> None:
        """Assign at once, as some layers do to weights that they read in the same call."""
        here = part()
        if here and not self._in_inner_graph():
            # Where one copy is all replicas', all write the same.
            value = here.mean({0: value}, {0: variable})[0]
        raw = kp.raw_value(variable)
        if isinstance(raw, tf.distribute.DistributedValues) or not hasattr(raw, "get"):
            kp.write(variable, value)
        else:  # the one copy of all replicas, in a wrapper that asks how they combine
            raw.get().assign(tf.cast(value, raw.dtype))

    def _check_metric(self, variable: Any) -> None:
        if self._in_inner_graph():
            raise TrainingError(
                f"the metric variable {variable.path!r} is updated inside a tf.function, a cond or"
                " a loop of train_step's own. Update metrics directly in the body of train_step;"
                " the step is compiled as a whole already."
            )


def metrics_and_others(model: keras.Model) -> tuple[list[Any], list[Any]]:
    """(the variables of a model's metrics, its other variables), each variable once."""
    metrics = metric_variables(metrics_of(model))
    known = {id(variable) for variable in metrics}
    return metrics, [variable for variable in model.variables if id(variable) not in known]


def assign_written(
    strategy: tf.distribute.Strategy, watched: Sequence[Any], written: dict[str, Any]
) -> None:
    """Assign what the replicas' steps wrote, in cross-replica context.

    Args:
        watched: as given to the ReplicaScope.
        written: from `ReplicaScope.outcome`, as `strategy.run` returned it.
    """
    for number, value in written.items():
        strategy.extended.update(
            kp.raw_value(watched[int(number)]),
            lambda variable, value: variable.assign(value),
            # The value is equal on all replicas, so any of them will do.
            args=(strategy.experimental_local_results(value)[0],),
            group=False,
        )


def _check_is_no_metric(variable: Any) -> None:
    """Raise TrainingError for a variable that each replica adds to, and that nobody adds up."""
    here = part()
    if here and here.replicas > 1 and variable.synchronization == "on_read":
        raise TrainingError(
            f"the step updates the metric variable {variable.path!r}, and the model does not know"
            " its metric, so its values on several replicas cannot be combined. Make the metric an"
            " attribute of the model or of one of its layers (self.tracker = ...), or return it"
            " from the model's metrics property."
        )


def _on_first_replica(variable: Any, value: Any) -> Any:
    """What a replica contributes to a value that is the same on all of them."""
    if variable.aggregation != "sum" or not tf.distribute.has_strategy():
        return value
    number = tf.distribute.get_replica_context().replica_id_in_sync_group
    return tf.where(tf.equal(number, 0), value, tf.zeros_like(value))


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
