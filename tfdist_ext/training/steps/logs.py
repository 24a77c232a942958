"""What a step logs: results of metrics, and what an overridden step returned.

A step of the user's returns values such as `{"acc": self.accuracy.result()}`, or an F1 score of
two metrics' results. While a replica runs its step, a metric there has seen that replica's rows
alone. The traced graph tells which returned values depend on metrics, and how: that part of it is
copied and runs at the end of the execution, on the states combined over all replicas
(`DerivedLogs`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any

import keras
import tensorflow as tf

from tfdist_ext.errors import TrainingError
from tfdist_ext.training import _keras_private as kp
from tfdist_ext.training.protocols import Structure
from tfdist_ext.training.steps.rows import copied_node

__all__ = [
    "DerivedLogs",
    "MetricVersions",
    "flat",
    "has_own_outputs",
    "is_carried",
    "metric_variables",
    "metrics_of",
    "names_of_updated",
    "own_outputs",
    "results",
]


def has_own_outputs(model: keras.Model, kind: str) -> bool:
    """Whether "train" or "test" steps return more than metrics, as Keras's own do not."""
    return any(
        getattr(type(model), name) is not getattr(keras.Model, name)
        for name in (f"{kind}_step", "compute_metrics")
    )


def own_outputs(model: keras.Model, outputs: Structure) -> dict[str, tf.Tensor]:
    """The outputs of an overridden step, by name, as tensors.

    To be called in the step's scope: a metric's result may be a variable itself.

    Raises:
        TrainingError: it is no dict.
    """
    if not isinstance(outputs, dict):
        raise TrainingError(
            f"{type(model).__name__}'s own step must return a dict of names and values, got"
            f" {outputs!r}."
        )
    return {name: tf.convert_to_tensor(value) for name, value in flat(outputs).items()}


def results(
    model: keras.Model, outputs: dict[str, tf.Tensor], of_metrics: Set[str], updated: set[int]
) -> dict[str, tf.Tensor]:
    """Logs, in a scope that holds the metrics' states of the whole epoch.

    Args:
        outputs: what an overridden step returned, over all replicas; empty without one.
        of_metrics: names of the outputs that are computed from metrics. Another output has the
            value of the metric of its name, if the step updates one.
        updated: ids of the metric variables that the step writes. A step of its own may return a
            "loss" and leave the model's tracker of that name at zero.
    """
    found = flat(model.get_metrics_result())
    if outputs:
        live = names_of_updated(model, updated) - of_metrics
        known = {name: found[name] for name in outputs if name in live and name in found}
        found = {**outputs, **known}
    return {name: tf.convert_to_tensor(value) for name, value in found.items()}


def names_of_updated(model: keras.Model, updated: set[int]) -> set[str]:
    """Names of the values of those metrics that have one of these variables, by id."""
    names = set()
    for metric in model.metrics:
        if any(id(variable) in updated for variable in metric.variables):
            value = metric.result()
            names |= set(value) if isinstance(value, dict) else {metric.name}
    return names


def metrics_of(model: keras.Model) -> list[keras.metrics.Metric]:
    """The model's metrics, those that a `metrics` property of its own leaves out too."""
    found = list(model.metrics)
    for layer in kp.flat_layers(model):
        kind = keras.Model if isinstance(layer, keras.Model) else keras.Layer
        found += kind.metrics.fget(layer)
    return list({id(metric): metric for metric in found}.values())


def metric_variables(metrics: Iterable[keras.metrics.Metric]) -> list[keras.Variable]:
    """The variables of metrics, each once."""
    variables = [variable for metric in metrics for variable in metric.variables]
    return list({id(variable): variable for variable in variables}.values())


def flat(outputs: dict[str, Any]) -> dict[str, Any]:
    """Without dicts in the dict, which a metric of several values leaves; as Keras flattens."""
    found: dict[str, Any] = {}
    for name, value in outputs.items():
        found.update(flat(value) if isinstance(value, dict) else {name: value})
    return found


class MetricVersions:
    """The tensors that the metrics' variables were while a step was traced."""

    def __init__(self) -> None:
        # Name of a tensor -> the variable that had its value.
        self.variables: dict[str, keras.Variable] = {}

    def add(self, variable: keras.Variable, value: tf.Tensor) -> tf.Tensor:
        """The tensor to use as the variable's value, which is the value of nothing else."""
        value = tf.identity(value)
        if not tf.executing_eagerly():
            self.variables[value.name] = variable
        return value


class DerivedLogs:
    """How the logs of a traced step are computed from metrics and from the rest of the step.

    A log that depends on no metric is one of the returned values. One that depends on metrics is
    computed from them and, if it depends on the rest of the step too, from the returned values that
    enter the computation.

    Args:
        logs: name -> tensor that the step returned.
        versions: the tensors that the metrics' variables were.
        final: name of a tensor -> number of the state that it is at the end of the step.
        has_mean: whether the values of a tensor on several replicas have a mean.

    Attributes:
        names: the logs that are computed from metrics.
        returned: (tensor, the metric's variable that it is a value of or None) of each value that
            the step must return.
        mixed: the logs that depend on metrics and on values without a mean over replicas. They
            are returned values.
    """

    def __init__(
        self,
        logs: dict[str, tf.Tensor],
        versions: MetricVersions,
        final: dict[str, int],
        has_mean: Callable[[tf.Tensor], bool],
    ):
        self._versions = versions.variables
        self._final = final
        self.returned: list[tuple[tf.Tensor, keras.Variable | None]] = []
        # Name of an input of the copied graph -> whether it is a final state, its number.
        self._feeds: dict[str, tuple[bool, int]] = {}
        self._shapes = {name: value.shape for name, value in logs.items()}
        ops = self._dependent()
        derived = {
            name: value
            for name, value in logs.items()
            if value.name in self._versions or value.op.name in ops
        }
        mixed = _reached(
            ops, lambda value: value.name not in self._versions and not has_mean(value)
        )
        self.mixed = [name for name, value in derived.items() if value.op.name in mixed]
        self.names = set(derived) - set(self.mixed)
        beside = _reached(ops, lambda value: value.name not in final)
        self._of_states = [
            name
            for name in sorted(self.names)
            if derived[name].op.name not in beside
            and (derived[name].op.name in ops or derived[name].name in final)
        ]
        computed = {name: logs[name] for name in self.names if logs[name].op.name in ops}
        self._graph = self._copied(ops, {value.op.name for value in computed.values()})
        self._logs = {
            name: value.name if name in computed else self._feed(value)
            for name, value in logs.items()
        }

    def compute(
        self, states: Sequence[tf.Tensor], returned: Sequence[tf.Tensor]
    ) -> dict[str, tf.Tensor]:
        """The logs.

        Args:
            states: the value of each metric variable over all replicas.
            returned: the values of `returned` over all replicas.
        """
        typed = [
            tf.cast(value, like.dtype)
            for value, (like, _) in zip(returned, self.returned, strict=True)
        ]
        feeds = {
            name: (states if is_state else typed)[number]
            for name, (is_state, number) in self._feeds.items()
        }
        computed = [name for name in self._logs.values() if name not in feeds]
        if computed:
            inputs = {name for node in self._graph.node for name in node.input}
            values = tf.graph_util.import_graph_def(
                self._graph,
                input_map={name: feeds[name] for name in inputs & feeds.keys()},
                return_elements=computed,
                name="logs",
            )
            feeds.update(zip(computed, values, strict=True))
        return {
            name: tf.ensure_shape(feeds[source], self._shapes[name])
            for name, source in self._logs.items()
        }

    def of_states(self, states: Sequence[tf.Tensor]) -> dict[str, tf.Tensor]:
        """The logs that are computed from the metrics' states alone."""
        zeros = [tf.zeros(value.shape, value.dtype) for value, _ in self.returned]
        logs = self.compute(states, zeros)
        return {name: logs[name] for name in self._of_states}

    def _dependent(self) -> dict[str, tf.Operation]:
        """Name -> operation of the step that depends on a metric's variable, after its inputs."""
        found: dict[str, tf.Operation] = {}
        for op in tf.compat.v1.get_default_graph().get_operations():
            depends = any(v.name in self._versions or v.op.name in found for v in op.inputs)
            if depends and not any(value.name in self._versions for value in op.outputs):
                found[op.name] = op
        return found

    def _copied(self, ops: dict[str, tf.Operation], wanted: set[str]) -> tf.compat.v1.GraphDef:
        """Operations, and those that lead to them, as a graph of their own with feeds as inputs.

        Args:
            ops: those that depend on metrics. What depends on none is fed, but for constants.
            wanted: names of some of them.
        """
        copied: dict[str, tf.Operation] = {}
        for op in reversed(ops.values()):
            if op.name in wanted:
                wanted = wanted | {v.op.name for v in op.inputs}
                copied[op.name] = op
                copied |= {v.op.name: v.op for v in op.inputs if _is_constant(v)}
        step = tf.compat.v1.get_default_graph()
        graph = tf.compat.v1.GraphDef(versions=step.graph_def_versions)
        for op in copied.values():
            inputs = [v.name if v.op.name in copied else self._feed(v) for v in op.inputs]
            graph.node.append(copied_node(op, op.name, inputs))
        attributes = [attribute for node in graph.node for attribute in node.attr.values()]
        if any(attribute.HasField("func") or attribute.list.func for attribute in attributes):
            graph.library.CopyFrom(step.as_graph_def().library)
        return graph

    def _feed(self, value: tf.Tensor) -> str:
        """The name of an input of the copied graph."""
        name = f"feed/{value.name}"
        if value.name in self._final:
            self._feeds[name] = True, self._final[value.name]
        elif name not in self._feeds:
            self._feeds[name] = False, len(self.returned)
            self.returned.append((value, self._versions.get(value.name)))
        return name


def is_carried(value: tf.Tensor) -> bool:
    """Whether a tensor can go from the step to the end of the execution: its size is known."""
    return value.dtype not in (tf.resource, tf.variant) and value.shape.is_fully_defined()


def _reached(ops: dict[str, tf.Operation], begins: Callable[[tf.Tensor], bool]) -> set[str]:
    """Names of the operations, sorted, that depend on inputs from outside with a property."""
    reached: set[str] = set()
    for op in ops.values():
        if any(
            value.op.name in reached
            if value.op.name in ops
            else not _is_constant(value) and begins(value)
            for value in op.inputs
        ):
            reached.add(op.name)
    return reached


def _is_constant(value: tf.Tensor) -> bool:
    return bool(value.op.type == "Const")
