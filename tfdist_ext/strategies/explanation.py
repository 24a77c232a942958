"""Why this strategy, and what it runs on, in words."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from tfdist_ext.errors import StrategyError
from tfdist_ext.messages import counted
from tfdist_ext.strategies.choice import Choice
from tfdist_ext.strategies.resolvers import Described, describe_if_known
from tfdist_ext.user_frames import filter_traceback

__all__ = [
    "Explanation",
    "computing_tasks",
    "devices_listed",
    "evaluates",
    "explain",
    "is_apart",
    "remember",
]

_LOCAL = "/job:localhost/replica:0/task:0/device:"


@dataclass(frozen=True)
class Explanation:
    """Why this strategy, and what it runs on. `str(explanation)` is a text of several lines.

    Attributes:
        strategy: its name, as `create_strategy` takes it; "made elsewhere" where it did not.
        type: the name of its class, for example "MirroredStrategy".
        reason: the signal that led to this strategy.
        settings: a line for each setting, with where it came from.
        task: what this process is, for example "this process alone".
        replicas: the replicas in sync, over all tasks; 1 under ParameterServerStrategy, whose
            workers train asynchronously.
        devices: names of the devices that compute on this task; empty where the strategy does not
            say: the default one, and ParameterServerStrategy.
        considered: a line for each alternative that was not taken, with the reason.
        steps: of a distributed model, a line for each step that has run: whether one trace of it
            serves all replicas of this task, and if not, why; and a line where BatchNormalization
            is not synchronized. Empty for a strategy.
        text: all of it, as `str` gives it.
    """

    strategy: str
    type: str
    reason: str
    settings: tuple[str, ...]
    task: str
    replicas: int
    devices: tuple[str, ...]
    considered: tuple[str, ...]
    steps: tuple[str, ...]
    text: str = field(repr=False)

    def __str__(self) -> str:
        return self.text


_CHOICE = "tfdist_choice"  # the attribute of a strategy


def remember(strategy: tf.distribute.Strategy, choice: Choice) -> None:
    """Keep with the strategy why it was chosen."""
    setattr(strategy, _CHOICE, choice)


def _made_by(strategy: tf.distribute.Strategy) -> Choice | None:
    """The choice that led to it; None where it was not made by `create_strategy`."""
    return getattr(strategy, _CHOICE, None)


def evaluates(strategy: tf.distribute.Strategy) -> Described | None:
    """The cluster beside which this task evaluates; None in every task that trains."""
    made = _made_by(strategy)
    cluster = None if made is None else made.cluster
    return cluster if cluster is not None and cluster.is_evaluator else None


def is_apart(strategy: tf.distribute.Strategy) -> bool:
    """Whether it was asked for without the cluster that the environment describes, on purpose."""
    made = _made_by(strategy)
    return made is not None and made.apart


def computing_tasks(strategy: tf.distribute.Strategy, count: int) -> list[str]:
    """The names of the tasks that compute, in the order of their replicas, as "worker 1"."""
    cluster = _choice_of(strategy).cluster
    jobs = {} if cluster is None else cluster.jobs
    names = [
        f"{job} {index}" if len(jobs.get(job, ())) > 1 or job == "worker" else f"the {job}"
        for job in ("chief", "worker")
        for index in range(len(jobs.get(job, ())))
    ]
    return names if len(names) == count else [f"worker {index}" for index in range(count)]


@filter_traceback
def explain(strategy: Any) -> Explanation:
    """The choice, the signal behind it, task, replicas, devices and alternatives; prints as text.

    Args:
        strategy: a `tf.distribute.Strategy`, or a distributed model: then how its steps are
            traced, too.

    Raises:
        StrategyError: `strategy` is neither.
    """
    steps: list[str] = []
    if not isinstance(strategy, tf.distribute.Strategy) and hasattr(strategy, "traces"):
        steps, strategy = strategy.traces(), strategy.strategy
    if not isinstance(strategy, tf.distribute.Strategy):
        raise StrategyError(
            f"strategy must be a tf.distribute.Strategy, got {strategy!r}; give explain what"
            " create_strategy or distribute returned."
        )
    made = _choice_of(strategy)
    task = _task(strategy, made.cluster)
    threads = tf.config.threading.get_intra_op_parallelism_threads()  # 0: as many as cores
    rows = [
        ("strategy", [f"{made.name} ({type(strategy).__name__})"]),
        ("because", [made.because]),
        ("settings", list(made.settings)),
        ("task", [task]),
        ("replicas", [_replicas(strategy)]),
        ("devices", [", ".join(_devices(strategy, made.cluster))]),
        ("threads", [f"at most {threads} in an operation on a CPU"] if threads else []),
        ("steps", steps),
        ("passed over", made.passed_over),
    ]
    text = "\n".join(
        f"{'' if number else title:<12} {value}".rstrip()
        for title, values in rows
        for number, value in enumerate(values)
    )
    asynchronous = isinstance(strategy, tf.distribute.ParameterServerStrategy)
    return Explanation(
        strategy=made.name,
        type=type(strategy).__name__,
        reason=made.because,
        settings=made.settings,
        task=task,
        replicas=strategy.num_replicas_in_sync,
        devices=() if asynchronous else tuple(devices_listed(strategy, "worker_devices")),
        considered=tuple(made.passed_over),
        steps=tuple(steps),
        text=text,
    )


def _choice_of(strategy: tf.distribute.Strategy) -> Choice:
    if (made := _made_by(strategy)) is not None:
        return made
    cluster = describe_if_known(getattr(strategy, "cluster_resolver", None))
    return Choice("made elsewhere", "it was not made by create_strategy", cluster=cluster)


def _task(strategy: tf.distribute.Strategy, cluster: Described | None) -> str:
    if cluster is None or not cluster.jobs:
        return "this process alone"
    if cluster.task is None:
        return f"the coordinator of a cluster of {cluster}"
    if cluster.is_evaluator:
        return f"{cluster.task}, beside a cluster of {cluster}"
    chief = ", the chief" if strategy.extended.should_checkpoint else ""
    return f"{cluster.task}{chief}, in a cluster of {cluster}"


def _replicas(strategy: tf.distribute.Strategy) -> str:
    if isinstance(strategy, tf.distribute.ParameterServerStrategy):
        return "each worker trains by itself (asynchronous)"
    together = strategy.num_replicas_in_sync
    here = len(devices_listed(strategy, "worker_devices"))
    if not here:
        return str(together)
    return f"{together} in sync" + (f", {here} of them on this task" if here != together else "")


def _devices(strategy: tf.distribute.Strategy, cluster: Described | None) -> list[str]:
    if isinstance(strategy, tf.distribute.ParameterServerStrategy):
        if cluster is None:
            return ["variables on the ps tasks, computing on the workers"]
        tasks = {job: len(addresses) for job, addresses in cluster.jobs.items()}
        workers = counted(tasks.get("worker", 0), "worker")
        return [f"variables on {tasks.get('ps', 0)} ps, computing on {workers}"]
    computing = devices_listed(strategy, "worker_devices")
    if not computing:
        return ["wherever TensorFlow places an operation"]
    keeping = devices_listed(strategy, "parameter_devices")
    if keeping and (set(keeping) - set(computing) or len(keeping) < len(computing)):
        return [*computing, f"variables on {', '.join(keeping)}"]
    return computing


def devices_listed(strategy: tf.distribute.Strategy, kind: str) -> list[str]:
    """Short names; none where a strategy says nothing of devices, as the default one."""
    try:
        devices = getattr(strategy.extended, kind)
    except (AttributeError, NotImplementedError, RuntimeError):
        return []
    return [name.removeprefix(_LOCAL) for name in devices]
