"""What one replica's step writes to variables, and what it reads from them.

Under a strategy, a write inside a replica's step is slow (a cross-replica operation each), and with
some strategies wrong. So `ReplicaScope` decides what a write does:

- The state of a metric travels through the loop of steps as a value.
- Any other variable is written at once, each replica its own copy (`OwnCopies`). When the step
  ends, each copy gets the mean over all rows.
- If replicas share one copy, or the strategy has an `update_variable` of its own, the values are
  collected, and the mean is written after the step. A value cannot leave a `cond` or a loop, so a
  write in there is an error.
- A weight gets its mean at once, because some layers read a weight in the call that assigns it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from tfdist_ext.data.pipelines import Structure
from tfdist_ext.errors import TrainingError
from tfdist_ext.placement.live.creating import is_partitioned
from tfdist_ext.strategies.traced_replica import replica_id, replica_number
from tfdist_ext.training._keras_private import (
    TAKE,
    Original,
    Target,
    flat_layers,
    loss_ids,
    overrides,
    raw_value,
    replaces,
    stateless_scope,
    substitutes,
    target_of,
    uses_keras_step,
)
from tfdist_ext.training.steps.context import (
    StepContext,
    current_graph,
    current_step,
    outside_of_inner_graphs,
)
from tfdist_ext.training.steps.random_numbers import rows_at
from tfdist_ext.training.steps.rows import adds_rows, follows_from, places_rows
from tfdist_ext.training.variables import is_updated_once, local_copies, local_copy
from tfdist_ext.user_frames import warn

# The value of each metric by name. An output that is not a single number is an array.
Logs: TypeAlias = dict[str, float | np.ndarray]


@dataclass(frozen=True)
class Execution:
    """The result of an execution: several steps of an epoch.

    Attributes:
        logs: over the epoch so far, the same on every worker.
        steps: global batches that were used.
        chief_seconds: how long the execution before this one took on the chief.
        stop_requested: a task received SIGTERM before this execution began.
    """

    logs: Logs
    steps: int
    chief_seconds: float
    stop_requested: bool = False


class StepScope(keras.StatelessScope):
    """The scope of a replica's or a worker's step.

    Attributes:
        updated: ids of the variables that were written.
    """

    def __init__(self, values: Iterable[tuple[keras.Variable, tf.Tensor]]):
        super().__init__(values, collect_losses=True, initialize_variables=False)
        self.updated: set[int] = set()
        self._graph = current_graph()
        self._results: list[tuple[keras.metrics.Metric, list[Any], list[Any]]] = []

    def rows(self, variable: keras.Variable, ids: tf.Tensor) -> tf.Tensor | None:
        """Rows of a table, moved without its other rows; None if that is not possible."""
        raise NotImplementedError

    def record(self, metric: keras.metrics.Metric, result: Structure) -> None:
        """Record the result of a metric, with the state from which it is computed."""
        self._results.append((metric, keras.tree.flatten(result), self._state_of(metric)))

    def final_results(self) -> dict[int, tuple[keras.metrics.Metric, int]]:
        """Returns, by id, the values that are results of metrics in the state at the end.

        Each has the metric, and the index of the value in its flat result.
        """
        return {
            id(value): (metric, index)
            for metric, values, state in self._results
            if all(a is b for a, b in zip(state, self._state_of(metric), strict=True))
            for index, value in enumerate(values)
        }

    def _in_inner_graph(self) -> bool:
        return current_graph() is not self._graph

    def _state_of(self, metric: keras.metrics.Metric) -> list[Any]:
        return [self.get_current_value(variable) for variable in metric.variables]


def _record_result(
    original: Original, metric: keras.metrics.Metric, *args: Any, **named: Any
) -> Structure:
    """Calls the `result` of a metric, and records it in the open StepScope."""
    value, scope = original(metric, *args, **named), stateless_scope()
    if isinstance(scope, StepScope):
        scope.record(metric, value)
    return value


def recording_results(model: keras.Model) -> dict[Target, Callable[..., Any]]:
    """Returns what a step calls in place of the `result` methods of a model's metrics."""
    targets = [target_of(type(metric), "result") for metric in metrics_of(model)]
    return dict.fromkeys(targets, _record_result)


class ReplicaScope(StepScope):
    """Holds the metrics' state, and decides what a write to another variable does.

    Args:
        metrics: (variable, value) of each metric's variable.
        watched: the model's other variables.
        copies: the replicas' own copies.
    """

    def __init__(
        self,
        metrics: Iterable[tuple[keras.Variable, tf.Tensor]],
        watched: Sequence[keras.Variable],
        copies: OwnCopies,
    ):
        metrics = list(metrics)
        super().__init__(metrics)
        self._metrics = {id(variable): variable for variable, _ in metrics}
        self._watched = {id(variable): (i, variable) for i, variable in enumerate(watched)}
        self.copies = copies

    def add_update(self, update: tuple[keras.Variable, tf.Tensor]) -> None:
        variable, value = update
        key, context = id(variable), current_step()
        self.updated.add(key)
        if context is not None:
            check_value(context, variable, value, is_metric=key in self._metrics)
        if key in self._metrics:
            self._update_metric(variable, value, context)
            return
        if context is not None and context.replicas > 1 and self._in_inner_graph():
            is_equal = not tf.is_symbolic_tensor(value) or context.equal.has(value)
            if variable.aggregation == "sum" and not is_equal:
                raise _rows_written(context, variable, "a cond or a loop")
        elif context is not None and context.replicas > 1:
            value = self._over_all_rows(variable, tf.convert_to_tensor(value), context)
        if key not in self._watched:
            _check_is_no_metric(variable)
        elif not variable.trainable or self._in_inner_graph():
            if self.copies.is_collected(variable):
                if self._in_inner_graph():
                    raise shared_by_replicas(raw_value(variable), self.copies.local_replicas)
                super().add_update((variable, value))
                return
            self.copies.add(variable)
        if context is not None and variable not in self.copies and not self._in_inner_graph():
            # Where replicas share the variable, all write the same value.
            (value,) = context.mean([value], [variable])
        _assign(self.copies.copy_of(variable), value)

    def get_current_value(self, variable: keras.Variable) -> tf.Tensor | tf.Variable:
        if id(variable) in self.state_mapping:
            return self.state_mapping[id(variable)]
        # Never None: Keras reads regularized weights through the scope.
        raw = raw_value(variable)
        if not is_partitioned(raw):
            return raw
        if not self._in_inner_graph():
            return self.copies.copy_of(variable)
        # The gradient of a loop has the shape of the loop's inputs. So the loop gets one tensor.
        with outside_of_inner_graphs(self._graph):
            return tf.convert_to_tensor(self.copies.copy_of(variable))

    def forget_losses(self, layer: keras.Layer) -> None:
        """Drop the losses that a layer and its sublayers gave to add_loss in this step."""
        for inner in flat_layers(layer) if self.losses else ():
            ids = loss_ids(inner)
            own = {id(loss) for loss in self.losses} & ids
            self.losses[:] = [loss for loss in self.losses if id(loss) not in own]
            ids -= own

    def rows(self, variable: keras.Variable, ids: tf.Tensor) -> tf.Tensor | None:
        """Rows of a table, gathered where the table is.

        TensorFlow copies a table to read all of it, if an optimizer writes to its rows.

        Returns:
            None if the step has given the table another value, in inner graphs, and on TPUs.
        """
        has_other_value = id(variable) in self.state_mapping
        if has_other_value or self._in_inner_graph() or self.copies.on_tpu:
            return None
        return tf.nn.embedding_lookup(self.copies.copy_of(variable), ids)

    def states(self) -> list[tf.Tensor]:
        """The state of each metric variable on this replica."""
        return [self.get_current_value(variable) for variable in self._metrics.values()]

    def written(self, context: StepContext) -> dict[str, tf.Tensor]:
        """Average what the replica has written, and assign the mean to the replica's own copies.

        To be called in the replica's context, after the scope.

        Returns:
            By the number of a watched variable, as a string, the means that are left to be assigned
            after the step. They are equal on all replicas.
        """
        collected = [entry for key, entry in self._watched.items() if key in self.state_mapping]
        variables: list[Any] = [variable for _, variable in collected]
        means = [self.state_mapping[id(variable)] for variable in variables]
        own = self.copies.written()
        values = [*means, *(self.copies.copy_of(variable).read_value() for variable in own)]
        means = context.mean(values, [*variables, *own])
        for variable, mean in zip(own, means[len(variables) :], strict=True):
            _assign(self.copies.copy_of(variable), mean)
        return {str(n): mean for (n, _), mean in zip(collected, means, strict=False)}

    def _update_metric(
        self, variable: keras.Variable, value: tf.Tensor, context: StepContext | None
    ) -> None:
        if self._in_inner_graph():
            raise metric_in_inner_graph(variable)
        if context is not None and context.replicas > 1 and variable.aggregation == "sum":
            if context.equal.has(value):
                # The metric is reset. The first replica gets the value, which is that of the sum.
                value = tf.where(tf.equal(replica_number(), 0), value, tf.zeros_like(value))
            else:
                # A replica without rows computes with another replica's row, which counts once.
                value = context.where_nonempty(value, self.state_mapping[id(variable)])
        super().add_update((variable, value))

    def _over_all_rows(
        self, variable: keras.Variable, value: tf.Tensor, context: StepContext
    ) -> tf.Tensor:
        """What a step has added to a variable of aggregation "sum", added over all replicas.

        Raises:
            TrainingError: an integer of another aggregation depends on the part of the batch.
        """
        if context.equal.has(value) or context.on_tpu:
            return value
        if variable.aggregation == "sum":
            before = tf.cast(self.get_current_value(variable), value.dtype)
            (added,) = context.sums.all_reduce([context.where_nonempty(value - before)])
            return before + added
        if not value.dtype.is_floating:
            raise _rows_written(context, variable, value.op.type)
        warn_of_sums(context, variable.path, value)
        return value


class StepOutputs:
    """The logs of "train" or "test" steps of a model, and what an overridden step returns.

    A step returns values such as `{"acc": self.accuracy.result()}`. During the step a metric has
    seen only the rows of its replica. So `result()` is called again at the end of the execution, on
    the states of all replicas. Any other number is the mean over rows.

    Attributes:
        has_own_values: whether steps return more than metrics, as Keras's own do not.
    """

    def __init__(self, model: keras.Model, kind: str):
        self.has_own_values = not uses_keras_step(model, kind) or overrides(
            model, "compute_metrics"
        )
        # Name of a log -> the metric whose result it is, and the index in the flat result.
        self._of_metrics: dict[str, tuple[keras.metrics.Metric, int]] = {}
        self._model = model
        self._kind = kind
        self._warned_of: set[str] = set()  # names of logs
        self._updated: set[int] = set()  # ids of variables that the step writes

    def own_values(
        self, returned: Structure, scope: StepScope, before: Sequence[tf.Tensor], *, warns: bool
    ) -> dict[str, tf.Tensor]:
        """Returns what the step returned, by name, other than metrics' results.

        To be called in the scope of the step: a metric's result may be a variable.

        Args:
            before: the states of the metrics before the step.
            warns: in a compiled step, a number that is computed from a metric gets a warning, and
                one that cannot be averaged is an error.

        Raises:
            TrainingError: an overridden step returned something else than a dict of numbers.
        """
        if not self.has_own_values:
            return {}
        if not isinstance(returned, dict):
            raise TrainingError(
                f"The custom step of {type(self._model).__name__} returns {returned!r}. Return a"
                " dict of names and values."
            )
        self._updated |= scope.updated
        logs, known = _flat(returned), scope.final_results()
        self._of_metrics = {n: known[id(value)] for n, value in logs.items() if id(value) in known}
        numbers = {
            name: tf.convert_to_tensor(value)
            for name, value in logs.items()
            if name not in self._of_metrics
        }
        for name, value in numbers.items():
            dtype, context = value.dtype, current_step()
            if tf.is_symbolic_tensor(value) and not value.shape.is_fully_defined():
                raise TrainingError(
                    f"The custom step of {type(self._model).__name__} returns a value for each row"
                    f" as {name!r}. Return one number, such as tf.reduce_mean(value), or the"
                    " result() of a metric."
                )
            is_equal = dtype.is_integer or dtype.is_bool  # on a worker of parameter servers
            is_equal = is_equal and (context is None or context.equal.has(value))
            if warns and not dtype.is_floating and not is_equal:
                raise TrainingError(
                    f"The custom step of {type(self._model).__name__} returns {name!r} of"
                    f" {dtype.name}, which depends on the rows of this replica, or is not a number."
                    " Only floating numbers are averaged over replicas. Return the result() of a"
                    " metric, such as keras.metrics.Sum."
                )
        if warns and not tf.executing_eagerly():
            self._warn_of([n for n, value in numbers.items() if follows_from(value, before)])
        return numbers

    def _warn_of(self, names: Sequence[str]) -> None:
        new = [name for name in names if name not in self._warned_of]
        self._warned_of.update(new)
        if new:
            warn(
                f"{type(self._model).__name__}.{self._kind}_step returns"
                f" {', '.join(map(repr, new))}, computed from a metric. Only a metric's result() is"
                " computed over all examples. Any other number is computed from the rows of a"
                " replica or worker, and averaged over replicas. Return the result() of a metric"
                " that computes this value from its own state."
            )

    def results(self, outputs: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Returns the logs, in a scope that holds the metrics' states of the whole epoch.

        Args:
            outputs: the other values that an overridden step returned, over all replicas. As in
                Keras, a metric of the same name replaces an output if the step updates the metric.
        """
        if not self.has_own_values:
            logs = _flat(self._model.get_metrics_result())
        else:
            logs = dict(outputs)
            for metric in self._model.metrics:
                if any(id(variable) in self._updated for variable in metric.variables):
                    named = _flat({metric.name: metric.result()})
                    logs.update({name: named[name] for name in named.keys() & outputs.keys()})
            for name, (metric, index) in self._of_metrics.items():
                logs[name] = keras.tree.flatten(metric.result())[index]
        return {name: tf.convert_to_tensor(value) for name, value in logs.items()}


def as_logs(values: Mapping[str, tf.Tensor]) -> Logs:
    """Returns numbers and arrays by name, sorted as in Keras."""
    arrays = {name: value.numpy() for name, value in sorted(values.items())}
    return {n: float(array) if array.ndim == 0 else array for n, array in arrays.items()}


def zeros_of(specs: Mapping[str, tf.TypeSpec]) -> dict[str, tf.Tensor]:
    """Returns zeros for the outputs of a step, from which a loop in the graph begins."""
    return {n: tf.zeros([size or 0 for size in s.shape], s.dtype) for n, s in specs.items()}


def _flat(outputs: dict[str, Any]) -> dict[str, Any]:
    """The values of nested dicts in one dict: a metric may have a dict of results."""
    flat: dict[str, Any] = {}
    for name, value in outputs.items():
        flat.update(_flat(value) if isinstance(value, dict) else {name: value})
    return flat


class OwnCopies:
    """The variables that replicas write at once, each replica its own copy.

    They are kept from step to step, because inner graphs of eager steps are traced once.

    Args:
        local_replicas: replicas of this worker.
    """

    def __init__(self, strategy: tf.distribute.Strategy, local_replicas: int):
        self._strategy = strategy
        self.local_replicas = local_replicas
        # TensorFlow does not give out the copies on TPUs one by one.
        self.on_tpu = isinstance(strategy, tf.distribute.TPUStrategy)
        self._written: dict[int, keras.Variable | tf.Variable] = {}  # by id of the container

    def __contains__(self, variable: keras.Variable) -> bool:
        return id(raw_value(variable)) in self._written

    def add(self, variable: keras.Variable | tf.Variable) -> None:
        """Note that replicas write a variable, given as a container or as one of its copies.

        Raises:
            TrainingError: the replicas of this worker share one copy.
        """
        container = self._strategy.extended.value_container(raw_value(variable))
        if getattr(container, "synchronization", None) == tf.VariableSynchronization.ON_READ:
            return
        if self.is_shared(container):
            raise shared_by_replicas(container, self.local_replicas)
        is_copy = isinstance(variable, tf.Variable)
        self._written[id(container)] = container if is_copy else variable

    def copy_of(self, variable: keras.Variable | tf.Variable) -> tf.Variable:
        """The running replica's copy of a variable, or the one copy that replicas share."""
        if self.on_tpu:
            return raw_value(variable)
        return local_copy(variable, self._strategy, replica_id())

    def is_shared(self, variable: keras.Variable | tf.Variable) -> bool:
        """Whether the replicas of this worker share one copy."""
        copies = self.local_replicas if self.on_tpu else len(local_copies(variable, self._strategy))
        return copies < self.local_replicas

    def is_collected(self, variable: keras.Variable) -> bool:
        """Whether what the replicas write is collected, and written once after the step."""
        return self.on_tpu or is_updated_once([variable], self._strategy, self.local_replicas)

    def written(self) -> list[keras.Variable | tf.Variable]:
        """The floating variables that were written."""
        return [v for v in self._written.values() if tf.as_dtype(v.dtype).is_floating]

    def all_copies(self) -> list[list[tf.Variable]]:
        """Of each variable that was written, the copies of all local replicas."""
        return [local_copies(variable, self._strategy) for variable in self._written.values()]


def check_value(
    context: StepContext,
    variable: keras.Variable | tf.Variable,
    value: object,
    *,
    is_metric: bool = False,
) -> None:
    """Raise TrainingError if rows of this part are written into a variable's rows.

    A metric may add them to its rows, because it is summed over replicas.
    """
    checks = context.replicas > 1 and context.graph is not None and not context.on_tpu
    if not checks or not tf.is_symbolic_tensor(value):
        return
    if how := places_rows(value, context.equal, is_metric=is_metric):
        raise _rows_written(context, variable, how)


def warn_of_sums(context: StepContext, name: str, value: tf.Tensor) -> None:
    """Warns of a sum or a count of this part's rows that a step adds to a variable."""
    if context.replicas > 1 and (how := adds_rows(value, context.equal)):
        warn(
            f"A step adds {how} of this replica's part of the batch to {name!r}, which is averaged"
            f" over {context.replicas} replicas. If the step only adds to the variable, create it"
            ' with add_weight(..., aggregation="sum"). Otherwise use the rows of all replicas:'
            " rows = tfd.all_rows(rows)."
        )


def check_equal(context: StepContext, variable: tf.Variable, values: object, how: str) -> None:
    """Raise TrainingError if numbers that must be equal on all replicas follow from this part."""
    if not context.equal.has(values):
        raise _rows_written(context, variable, how)


def _rows_written(
    context: StepContext, variable: keras.Variable | tf.Variable, how: str
) -> TrainingError:
    name = getattr(variable, "path", variable.name)
    return TrainingError(
        f"What a step assigns to {name!r} must be the same on all {context.replicas} replicas, but"
        f" {how!r} writes rows of this replica's part of the batch, or a number that depends on"
        " them. Use the rows of all replicas: rows = tfd.all_rows(rows). Do the same for indices"
        ' and counts. A variable to which a step only adds may have aggregation="sum" in'
        " add_weight. A keras.metrics.Metric counts over all replicas."
    )


def shared_by_replicas(variable: tf.Variable, replicas: int) -> TrainingError:
    """The error of a variable that a step may not write in this place."""
    return TrainingError(
        f"The variable {variable.name!r} of shape {variable.shape} is assigned in a step, and the"
        f" {replicas} replicas of this process share one copy of it, or its aggregation is SUM, or"
        " the strategy overrides update_variable."
        " Create it with self.add_weight(..., trainable=False) in a layer or model, and assign it"
        " in the body of train_step or call, not in a tf.function, a cond or a loop. The assigned"
        " value is averaged over all rows. For sums, use a keras.metrics.Metric."
    )


def _assign(variable: tf.Variable, value: tf.Tensor) -> None:
    with substitutes(None):  # it is no variable of the user's
        variable.assign(tf.cast(value, variable.dtype))


def metrics_and_others(model: keras.Model) -> tuple[list[keras.Variable], list[keras.Variable]]:
    """Returns (the variables of a model's metrics, its other variables), each variable once."""
    metrics = {id(v): v for metric in metrics_of(model) for v in metric.variables}
    rest = [variable for variable in model.variables if id(variable) not in metrics]
    return list(metrics.values()), rest


def metrics_of(model: keras.Model) -> list[keras.metrics.Metric]:
    """The model's metrics, including those that its own `metrics` property leaves out."""
    metrics = list(model.metrics)
    for layer in flat_layers(model):
        kind = keras.Model if isinstance(layer, keras.Model) else keras.Layer
        metrics += kind.metrics.fget(layer)
    return list({id(metric): metric for metric in metrics}.values())


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
            raw_value(variable),
            lambda copy, value: copy.assign(value, read_value=False),
            args=(value,),
            group=False,
        )


def metric_in_inner_graph(variable: keras.Variable) -> TrainingError:
    """Returns the error for a metric variable that an inner graph writes."""
    return TrainingError(
        f"The metric variable {variable.path!r} is updated inside a tf.function, a cond or a loop"
        " within train_step. Update it in the body of train_step, which is compiled as a whole."
    )


def _check_is_no_metric(variable: keras.Variable) -> None:
    """Raises TrainingError for a metric variable that is not the model's."""
    context = current_step()
    if context and context.replicas > 1 and variable.synchronization == "on_read":
        raise TrainingError(
            f"The step updates {variable.path!r} of a metric that does not belong to the model, so"
            " its values on several replicas cannot be combined. Make the metric an attribute of"
            " the model or of one of its layers (self.tracker = ...), or return it from the model's"
            " metrics property."
        )


@replaces(TAKE)
def take(
    context: StepContext | None,
    original: Original,
    x: keras.Variable | tf.Tensor,
    indices: tf.Tensor | tf.RaggedTensor | tf.SparseTensor,
    axis: int | None = None,
) -> tf.Tensor | tf.RaggedTensor:
    """Gathers rows of a shared table on its device; Keras copies the table first."""
    if context is not None and axis is not None:
        x = rows_at(context, x, indices, axis)
    scope, is_ragged = stateless_scope(), isinstance(indices, tf.RaggedTensor)
    is_table = axis == 0 and isinstance(x, keras.Variable)
    if not is_table or not isinstance(scope, StepScope) or isinstance(indices, tf.SparseTensor):
        return original(x, indices, axis=axis)
    ids = tf.convert_to_tensor(indices.flat_values if is_ragged else indices)
    taken = scope.rows(x, tf.where(ids < 0, ids + tf.cast(x.shape[0], ids.dtype), ids))
    if taken is None:
        return original(x, indices, axis=axis)
    taken = tf.cast(taken, x.dtype)  # the layer's compute type, where it casts
    return indices.with_flat_values(taken) if is_ragged else taken
