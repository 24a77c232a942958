"""Methods of metrics while the step of a replica runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist_ext.errors import TrainingError
from tfdist_ext.training import _keras_private as kp
from tfdist_ext.training.called_back import calls_go_to
from tfdist_ext.training.part import Part, current_graph, part, set_part
from tfdist_ext.training.reduction import contribution
from tfdist_ext.training.replica_scope import ReplicaScope

__all__ = ["contribution_of_part", "metric_methods"]


@contextlib.contextmanager
def metric_methods(metrics: Iterable[Any], *, eager: bool) -> Iterator[None]:
    """Scope in which a step may reset metrics and, if it is eager, reads them over all replicas.

    A reset counts on replicas without rows too, and its value once. The results that a step
    returns are known from its graph where it has one (see `DerivedLogs`); in an eager step
    `result()` itself is computed from the states of all replicas.
    """
    with contextlib.ExitStack() as stack:
        for metric in metrics:
            methods = {"reset_state": _resetting(metric.reset_state)}
            if eager:
                methods["result"] = _result_over_all(metric, metric.result)
            stack.enter_context(calls_go_to(metric, **methods))
        yield


def contribution_of_part(here: Part, variable: Any, value: Any, without_rows: Any) -> Any:
    """What a replica's state of a metric adds to the state over all replicas, in its context."""
    if variable.aggregation == "sum":
        value = tf.where(here.present(tf.float32) > 0, value, without_rows)
    number = tf.distribute.get_replica_context().replica_id_in_sync_group
    return contribution(variable, value, here.replicas, tf.equal(number, 0))


def _resetting(original: Any) -> Any:
    def reset_state(*args: Any, **kwargs: Any) -> Any:
        scope = kp.stateless_scope()
        if not isinstance(scope, ReplicaScope):
            return original(*args, **kwargs)
        before, scope.resetting = scope.resetting, True
        try:
            return original(*args, **kwargs)
        finally:
            scope.resetting = before

    return reset_state


def _result_over_all(metric: Any, original: Any) -> Any:
    def result(*args: Any, **kwargs: Any) -> Any:
        here, scope = part(), kp.stateless_scope()
        if not isinstance(scope, ReplicaScope):
            return original(*args, **kwargs)
        if here is None or here.replicas == 1:
            value = original(*args, **kwargs)
        else:
            if current_graph() is not None:
                raise TrainingError(
                    f"result() of the metric {metric.name!r} is called inside a tf.function of an"
                    " eager step, where replicas cannot combine their states. Call it directly in"
                    " the step, or compile the model without run_eagerly=True."
                )
            with set_part(None), ReplicaScope(_over_all(here, scope, metric.variables)):
                value = original(*args, **kwargs)
        scope.results += keras.tree.flatten(value)
        return value

    return result


def _over_all(here: Part, scope: ReplicaScope, variables: list[Any]) -> list[tuple[Any, Any]]:
    """(variable, state over all replicas) of each variable of a metric."""
    known = [variable for variable in variables if id(variable) in scope.without_rows]
    states = [scope.get_current_value(variable) for variable in known]
    contributions = [
        contribution_of_part(here, variable, state, scope.without_rows[id(variable)])
        for variable, state in zip(known, states, strict=True)
    ]
    reduced = here.meeting(here.sum_up, contributions)
    return [
        (variable, tf.cast(value, state.dtype))
        for variable, value, state in zip(known, reduced, states, strict=True)
    ]
