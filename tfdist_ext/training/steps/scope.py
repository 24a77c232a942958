"""What one replica's step writes, collected instead of done.

Keras writes metrics and moving statistics from inside each replica's step. Under a strategy these
writes are slow (a cross-replica operation each), and with some strategies wrong. Here they become
values of the step: metrics stay in the loop until it ends, moving statistics are averaged and
written once. What is written inside a `cond` or a loop of a layer's own cannot leave it as a
value. It goes to the replica's own copy of the variable (`LocalVariables`): it is unlike the
others' until the step ends, and the mean over all rows is written to all of them.

Keras turns a table into a tensor before it takes rows of it, and so sends all of it to the device
of each replica. Where replicas share one copy, rows are gathered where the table is
(`rows_of_shared`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist_ext.errors import TrainingError
from tfdist_ext.placement.live.creating import is_partitioned
from tfdist_ext.strategies.reductions import tells_what_it_reduces
from tfdist_ext.strategies.traced_replica import copy_number, is_traced_once, replica_number
from tfdist_ext.training import _keras_private as kp
from tfdist_ext.training.steps.context import StepContext, current_step
from tfdist_ext.training.steps.logs import StepScope, metric_variables, metrics_of
from tfdist_ext.training.steps.replaced import substitutes
from tfdist_ext.training.steps.rows import places_rows
from tfdist_ext.training.steps.sums import current_graph, outside_of_inner_graphs
from tfdist_ext.training.variables import (
    copies_per_worker,
    local_copy,
    outside_of_scopes,
)

__all__ = [
    "LocalVariables",
    "ReplicaScope",
    "assign_each",
    "assign_written",
    "check_aggregated",
    "check_equal",
    "check_indices",
    "check_value",
    "metric_in_inner_graph",
    "metric_variables_on_one_copy",
    "metrics_and_others",
    "shared_by_replicas",
    "take_rows",
]


class ReplicaScope(StepScope):
    """Holds the metrics' state and collects writes to the model's other variables.

    Args:
        metrics: (variable, value) of each metric's variable.
        watched: the model's other variables. What a replica writes to them becomes the mean over
            all rows: when the step ends, or at once for those that an optimizer trains.
        own: where the replica keeps what is written in inner graphs.
    """

    def __init__(
        self,
        metrics: Iterable[tuple[keras.Variable, tf.Tensor]],
        watched: Sequence[keras.Variable] = (),
        own: LocalVariables | None = None,
    ):
        metrics = list(metrics)
        super().__init__(metrics)
        self._metrics = {id(variable): variable for variable, _ in metrics}
        self._others = list(watched)
        self.without_rows = dict(self.state_mapping)  # what the states are if this part is empty
        self.has_reset = False  # in this step
        self._watched = {id(variable): number for number, variable in enumerate(watched)}
        self.own = own or LocalVariables(tf.distribute.get_strategy(), 1)
        self._apart: set[int] = set()  # watched variables whose value is in a variable beside them
        self._graph = current_graph()
        self.updated: set[int] = set()  # ids of the metrics' variables that were written
        for variable in self.own.written.values():
            # Not only when one is met: inner graphs of eager steps are traced in the first alone.
            self._move_to_own(variable)

    def add_update(self, update: tuple[keras.Variable, tf.Tensor]) -> None:
        variable, value = update
        key = id(variable)
        if (context := current_step()) is not None:
            check_value(context, variable, value, is_metric=key in self._metrics)
        if key in self._metrics:
            if self._in_inner_graph():
                raise metric_in_inner_graph(variable)
            self.updated.add(key)
            if self.resetting:
                self.has_reset = True
                value = self.without_rows[key] = _on_first_replica(variable, value)
            super().add_update((variable, value))
        elif key not in self._watched:
            _check_is_no_metric(variable)
            self._write(variable, value)
        elif self._in_inner_graph():
            self._move_to_own(variable)
            self.own.write(variable, value)
        elif variable.trainable:
            self._write(variable, value)
        else:
            super().add_update(update)

    def get_current_value(self, variable: keras.Variable) -> tf.Tensor | tf.Variable:
        key = id(variable)
        if key in self._watched and self._in_inner_graph():
            self._move_to_own(variable)  # the graph may be a loop that writes it later
        if key in self.state_mapping:
            return self.state_mapping[key]
        # Never None: Keras reads regularized weights through the scope.
        if key in self._apart:
            return self.own.of(variable)
        raw = kp.raw_value(variable)
        if not is_partitioned(raw):
            return raw
        if not self._in_inner_graph():
            return self._shared_copy(variable)
        # The gradient of a loop has the shape of the loop's inputs. So the loop gets one tensor.
        with outside_of_inner_graphs(self._graph):
            return tf.convert_to_tensor(self._shared_copy(variable))

    def forget_losses(self, layer: keras.Layer) -> None:
        """Drop the losses that a layer and its sublayers gave to add_loss in this step."""
        for each in kp.flat_layers(layer) if self.losses else ():
            ids = kp.loss_ids(each)
            mine = {id(loss) for loss in self.losses} & ids
            self.losses[:] = [loss for loss in self.losses if id(loss) not in mine]
            ids -= mine

    def rows(self, variable: keras.Variable, ids: tf.Tensor) -> tf.Tensor | None:
        """Rows of a table that replicas share, gathered where the table is.

        Returns:
            None if each replica has a copy, if the step has given the table another value, and in
            inner graphs.
        """
        has_other_value = id(variable) in self.state_mapping or id(variable) in self._apart
        if self._in_inner_graph() or has_other_value or not self.own.is_shared(variable):
            return None
        return tf.nn.embedding_lookup(self._shared_copy(variable), ids)

    @staticmethod
    def _shared_copy(variable: keras.Variable) -> tf.Variable:
        return local_copy(variable, tf.distribute.get_strategy(), 0)

    def states(self) -> list[tf.Tensor]:
        """The state of each metric variable on this replica."""
        return [self.get_current_value(variable) for variable in self._metrics.values()]

    def written(self, context: StepContext | None) -> dict[str, tf.Tensor]:
        """What the replica has written to the watched variables.

        To be called in the replica's context, after the scope.

        Returns:
            By the number of a variable, as a string, its new value, equal on all replicas, for
            `assign_written`, where the replica has not assigned it itself.
        """
        written = {
            self._watched[key]: tf.convert_to_tensor(self.own.of(variable))
            for key, variable in self.own.written.items()
        }
        for key, number in self._watched.items():
            if key in self.state_mapping:
                written[number] = self.state_mapping[key]
        if context is not None:
            users = dict(enumerate(self.own.of_users(), len(self._others)))
            written |= {number: copy.read_value() for number, copy in users.items()}
            written = context.mean(written, {**dict(enumerate(self._others)), **users})
            for number, copy in users.items():
                copy.assign(written.pop(number), read_value=False)
        for number in list(written) if self.own.assigned_by_replicas() else ():
            variable = self._others[number]
            if not self.own.is_apart(variable):
                copy = self.own.of(variable)
                copy.assign(tf.cast(written.pop(number), copy.dtype), read_value=False)
        return {str(number): value for number, value in written.items()}

    def _in_inner_graph(self) -> bool:
        return current_graph() is not self._graph

    def _move_to_own(self, variable: keras.Variable) -> None:
        """See to it that the replica's own copy has the value that is current before this graph."""
        key = id(variable)
        collected = self.state_mapping.pop(key, None)
        is_apart = self.own.is_apart(variable)
        if collected is not None or (is_apart and key not in self._apart):
            with outside_of_inner_graphs(self._graph):
                value = kp.raw_value(variable) if collected is None else collected
                _assign(self.own.of(variable), value)
        if collected is not None:
            self.own.written[key] = variable
        if is_apart:
            self._apart.add(key)

    def _write(self, variable: keras.Variable, value: tf.Tensor) -> None:
        """Assign at once, as some layers do to weights that they read in the same call."""
        context = current_step()
        if context and not self._in_inner_graph():
            # Where one copy is all replicas', all write the same.
            value = context.mean({0: value}, {0: variable})[0]
        raw = kp.raw_value(variable)
        if isinstance(raw, tf.distribute.DistributedValues) or not hasattr(raw, "get"):
            _assign(raw, value)
        else:  # the one copy of all replicas, in a wrapper that asks how they combine
            _assign(raw.get(), value)


class LocalVariables:
    """The copies of one program, kept from step to step.

    Args:
        local_replicas: replicas of this worker.
    """

    def __init__(self, strategy: tf.distribute.Strategy, local_replicas: int):
        self._strategy = strategy
        self._local_replicas = local_replicas
        self._beside: dict[int, Sequence[tf.Variable]] = {}
        # By id, the variables that steps write in inner graphs.
        self.written: dict[int, keras.Variable] = {}
        # By id of the first copy, the copies of each tf.Variable of the user's that steps write.
        self._of_users: dict[int, Sequence[tf.Variable]] = {}

    def is_apart(self, variable: keras.Variable) -> bool:
        """Whether the replica's copy is another variable than the one that steps start from."""
        return not variable.trainable and self.is_shared(variable)

    def assigned_by_replicas(self) -> bool:
        """Whether replicas assign to copies of their own what all have agreed on."""
        # An update of a StrategyTemplate is one call of its hook.
        return is_traced_once() and not tells_what_it_reduces(self._strategy)

    def of(self, variable: keras.Variable) -> tf.Variable:
        """The variable to read and assign on the running replica."""
        if isinstance(self._strategy, tf.distribute.TPUStrategy):
            return kp.raw_value(variable)  # copies cannot be had one by one there
        number = copy_number() % self._local_replicas
        if not self.is_apart(variable):
            return local_copy(variable, self._strategy, number)
        return self._apart(variable)[number]

    def copies(self) -> list[Sequence[tf.Variable]]:
        """Those that are other variables than the model's, for each replica."""
        return [*self._beside.values(), *self._of_users.values()]

    def note_write(self, variable: tf.Variable) -> None:
        """Note that the replica writes its copy of a tf.Variable of the user's.

        Raises:
            TrainingError: it is the copy of all replicas of this worker.
        """
        if any(variable.handle is copy.handle for each in self._of_users.values() for copy in each):
            return
        container = self._strategy.extended.value_container(variable)
        if getattr(container, "synchronization", None) == tf.VariableSynchronization.ON_READ:
            return
        copies = self._strategy.experimental_local_results(container)
        if len(copies) < self._local_replicas:
            raise shared_by_replicas(variable, self._local_replicas)
        self._of_users[id(copies[0])] = copies

    def of_users(self) -> list[tf.Variable]:
        """The running replica's copies of the user's floating variables that steps write."""
        number = copy_number() % self._local_replicas if self._of_users else 0
        copies = [copies[number] for copies in self._of_users.values()]
        return [copy for copy in copies if copy.dtype.is_floating]

    def _apart(self, variable: keras.Variable) -> Sequence[tf.Variable]:
        if id(variable) not in self._beside:
            new = [outside_of_scopes(_like, variable) for _ in range(self._local_replicas)]
            # Replicas run in threads.
            self._beside.setdefault(id(variable), new)
        return self._beside[id(variable)]

    def write(self, variable: keras.Variable, value: tf.Tensor) -> None:
        """Assign inside an inner graph.

        Raises:
            TrainingError: a trained weight of which all replicas have one copy.
        """
        if variable.trainable and self.is_shared(variable):
            raise shared_by_replicas(kp.raw_value(variable), self._local_replicas)
        _assign(self.of(variable), value)
        self.written[id(variable)] = variable

    def is_shared(self, variable: keras.Variable) -> bool:
        """Whether the replicas of this worker have one copy together."""
        if self._local_replicas == 1 or isinstance(self._strategy, tf.distribute.TPUStrategy):
            return False
        return copies_per_worker(variable, self._strategy) < self._local_replicas


def check_value(
    context: StepContext,
    variable: keras.Variable | tf.Variable,
    value: Any,
    *,
    is_metric: bool = False,
) -> None:
    """Raise TrainingError if rows of this part are written into a variable's rows.

    A metric may add them to its rows, because it is summed over replicas.
    """
    if context.replicas == 1 or context.graph is None or context.on_tpu:
        return
    if not tf.is_symbolic_tensor(value):
        return
    if (how := places_rows(value, context.equal, is_metric=is_metric)) is not None:
        raise _rows_written(context, variable, how)


def check_indices(context: StepContext, variable: tf.Variable, indices: Any, how: str) -> None:
    """Raise TrainingError if the indices that are written follow from this part's rows."""
    if tf.is_symbolic_tensor(indices) and not context.equal.has(indices):
        raise _rows_written(context, variable, how)


def _rows_written(
    context: StepContext, variable: keras.Variable | tf.Variable, how: str
) -> TrainingError:
    return TrainingError(
        f"what is assigned to {getattr(variable, 'path', variable.name)!r} must be the same on"
        f" all {context.replicas} replicas, got rows of this replica's part of the batch (from"
        f" {how}): each replica would write other rows. Use the rows of all replicas:"
        " rows = tfd.all_rows(rows), and so for their indices, before they are put into"
        f" {variable.name!r}."
    )


def check_equal(context: StepContext, variable: tf.Variable, values: Any) -> None:
    """Raise TrainingError if a variable that has no mean gets a value of this part's rows."""
    values = [each for each in tf.nest.flatten(values) if tf.is_symbolic_tensor(each)]
    if not variable.dtype.is_floating and not context.equal.has(values):
        raise TrainingError(
            f"What is assigned to the variable {variable.name!r} ({variable.dtype.name}) must"
            f" be the same on all {context.replicas} replicas, but it depends on the rows of this"
            " replica's part of the batch. Compute it from the rows of all replicas, as"
            " tf.shape(tfd.all_rows(x))[0], or count in a keras.metrics.Metric."
        )


def check_aggregated(context: StepContext, variable: tf.Variable) -> None:
    """Raise TrainingError where replicas cannot wait for each other to aggregate a value."""
    if current_graph() is not context.graph:
        raise TrainingError(
            f"The variable {variable.name!r} ({variable.aggregation.name}) is assigned inside a"
            " tf.function, a cond or a loop of the step's own, where replicas cannot combine"
            " their values. Assign it directly in the body of train_step or call, or create it"
            " with self.add_weight(..., trainable=False)."
        )


def shared_by_replicas(variable: tf.Variable, replicas: int) -> TrainingError:
    """The error of a tf.Variable that each replica would write, and of which there is one copy."""
    return TrainingError(
        f"The variable {variable.name!r} of shape {variable.shape} is assigned in a step, and the"
        f" {replicas} replicas of this process share one copy of it: each would write its own"
        " value. Create it with self.add_weight(..., trainable=False) in a layer or model: what a"
        " step assigns to that is averaged over all rows. A trainable weight can be assigned in the"
        " body of train_step or call, but not in a tf.function, a cond or a loop."
    )


def _assign(variable: tf.Variable, value: tf.Tensor) -> None:
    with substitutes(None):  # it is no variable of the user's
        variable.assign(tf.cast(value, variable.dtype))


def _like(variable: keras.Variable) -> tf.Variable:
    raw = kp.raw_value(variable)
    with tf.device("CPU:0"):
        return tf.Variable(tf.zeros(raw.shape, raw.dtype), trainable=False)


def metrics_and_others(model: keras.Model) -> tuple[list[keras.Variable], list[keras.Variable]]:
    """(the variables of a model's metrics, its other variables), each variable once."""
    metrics = metric_variables(metrics_of(model))
    known = {id(variable) for variable in metrics}
    return metrics, [variable for variable in model.variables if id(variable) not in known]


def assign_written(
    strategy: tf.distribute.Strategy,
    watched: Sequence[keras.Variable],
    written: dict[str, tf.Tensor],
) -> None:
    """Assign what the replicas' steps wrote, in cross-replica context.

    Args:
        watched: as given to the ReplicaScope.
        written: from `ReplicaScope.written`, as `strategy.run` returned it.
    """
    variables = [watched[int(number)] for number in written]
    # The value is equal on all replicas, so any of them will do.
    values = [strategy.experimental_local_results(value)[0] for value in written.values()]
    assign_each(strategy, variables, values)


def assign_each(
    strategy: tf.distribute.Strategy,
    variables: Iterable[keras.Variable],
    values: Iterable[tf.Tensor],
) -> None:
    """Assign a value to each variable, in cross-replica context.

    `assign` itself would read each copy afterwards, and take ten times as long.
    """
    for variable, value in zip(variables, values, strict=True):
        strategy.extended.update(
            kp.raw_value(variable),
            lambda copy, value: copy.assign(value, read_value=False),
            args=(value,),
            group=False,
        )


def metric_in_inner_graph(variable: keras.Variable) -> TrainingError:
    """The error for a metric's variable that is written where its value cannot leave the graph."""
    return TrainingError(
        f"the metric variable {variable.path!r} must be updated directly in the body of"
        " train_step, got an update inside a tf.function, a cond or a loop of train_step's"
        " own. The step is compiled as a whole already."
    )


def _check_is_no_metric(variable: keras.Variable) -> None:
    """Raise TrainingError for a variable that each replica adds to, and that is summed nowhere."""
    context = current_step()
    if context and context.replicas > 1 and variable.synchronization == "on_read":
        raise TrainingError(
            "a metric that the step updates must belong to the model, got the variable"
            f" {variable.path!r} of another one: its values on several replicas cannot be combined."
            " Make the metric an attribute of the model or of one of its layers (self.tracker ="
            " ...), or return it from the model's metrics property."
        )


def _on_first_replica(variable: keras.Variable, value: tf.Tensor) -> tf.Tensor:
    """A replica's contribution to a value that is the same on all of them."""
    if variable.aggregation != "sum" or not tf.distribute.has_strategy():
        return value
    number = replica_number()
    return tf.where(tf.equal(number, 0), value, tf.zeros_like(value))


def metric_variables_on_one_copy() -> contextlib.AbstractContextManager[None]:
    """Scope in which metrics' variables are ordinary mirrored ones.

    Keras creates them to be summed over replicas when read. Reading such a variable is a
    collective, so a callback that looks at a metric on the chief alone would wait forever. The
    replicas' own states are in the loop; the variable only shows their aggregate.
    """

    def creator(next_creator: Callable[..., tf.Variable], **kwargs: Any) -> tf.Variable:
        if kwargs.get("synchronization") == tf.VariableSynchronization.ON_READ:
            kwargs["synchronization"] = tf.VariableSynchronization.AUTO
            kwargs["aggregation"] = tf.VariableAggregation.ONLY_FIRST_REPLICA
        return next_creator(**kwargs)

    return tf.variable_creator_scope(creator)


def take_rows(
    original: Callable[..., tf.Tensor],
    x: keras.Variable | tf.Tensor,
    indices: tf.Tensor | tf.RaggedTensor | tf.SparseTensor,
    axis: int | None = None,
) -> tf.Tensor | tf.RaggedTensor:
    """`keras.ops.take`, which gathers rows of a table where the table is, if the step can."""
    scope, is_ragged = kp.stateless_scope(), isinstance(indices, tf.RaggedTensor)
    is_table = axis == 0 and isinstance(x, keras.Variable)
    if not is_table or not isinstance(scope, StepScope) or isinstance(indices, tf.SparseTensor):
        return original(x, indices, axis=axis)
    ids = tf.convert_to_tensor(indices.flat_values if is_ragged else indices)
    taken = scope.rows(x, tf.where(ids < 0, ids + tf.cast(x.shape[0], ids.dtype), ids))
    if taken is None:
        return original(x, indices, axis=axis)
    taken = tf.cast(taken, x.dtype)  # the layer's compute type, where it casts
    return indices.with_flat_values(taken) if is_ragged else taken
