"""Why this strategy, and what it runs on, in words."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

__all__ = ["Explanation", "explain", "remember"]


@dataclass(frozen=True)
class Explanation:
    """What the factory knew when it made a strategy."""

    name: str
    because: str
    settings: tuple[str, ...] = ()
    passed_over: tuple[str, ...] = ()


_MADE: weakref.WeakKeyDictionary[Any, Explanation] = weakref.WeakKeyDictionary()


def remember(strategy: tf.distribute.Strategy, explanation: Explanation) -> None:
    _MADE[strategy] = explanation


def explain(strategy: tf.distribute.Strategy) -> str:
    """Several lines: the choice, the signal behind it, task, replicas, devices, alternatives."""
    unknown = Explanation("made elsewhere", "it was not made by create_strategy")
    made = _MADE.get(strategy, unknown)
    rows = [
        ("strategy", [f"{made.name} ({type(strategy).__name__})"]),
        ("because", [made.because]),
        ("settings", list(made.settings)),
        ("task", [_task(strategy)]),
        ("replicas", [_replicas(strategy)]),
        ("devices", [", ".join(_devices(strategy))]),
        ("passed over", list(made.passed_over)),
    ]
    lines = []
    for title, values in rows:
        for number, value in enumerate(values):
            lines.append(f"{title if number == 0 else '':<12} {value}".rstrip())
    return "\n".join(lines)


def _task(strategy: tf.distribute.Strategy) -> str:
    resolver = getattr(strategy, "cluster_resolver", None)
    if resolver is None or not resolver.task_type:
        return "this process alone"
    spec = resolver.cluster_spec().as_dict()
    parts = ", ".join(f"{len(addresses)} {job}" for job, addresses in spec.items())
    chief = ", the chief" if strategy.extended.should_checkpoint else ""
    return f"{resolver.task_type}:{resolver.task_id}{chief}, in a cluster of {parts}"


def _replicas(strategy: tf.distribute.Strategy) -> str:
    if isinstance(strategy, tf.distribute.ParameterServerStrategy):
        return "each worker trains by itself (asynchronous)"
    together = strategy.num_replicas_in_sync
    if _is_default(strategy):
        return "1"
    here = len(strategy.extended.worker_devices)
    return f"{together} in sync" + (f", {here} of them on this task" if here != together else "")


def _devices(strategy: tf.distribute.Strategy) -> list[str]:
    if isinstance(strategy, tf.distribute.ParameterServerStrategy):
        return list(strategy.cluster_resolver.cluster_spec().as_dict())
    if _is_default(strategy):
        return ["wherever TensorFlow places an operation"]
    computing = list(strategy.extended.worker_devices)
    keeping = list(strategy.extended.parameter_devices)
    if set(keeping) - set(computing) or len(keeping) < len(computing):
        return [*computing, f"variables on {', '.join(keeping)}"]
    return computing


def _is_default(strategy: tf.distribute.Strategy) -> bool:
    """The default strategy says nothing of devices."""
    return type(strategy) is type(tf.distribute.get_strategy()) and not tf.distribute.has_strategy()
