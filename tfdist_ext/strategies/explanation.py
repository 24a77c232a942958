"""Why this strategy, and what it runs on, in words."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

import tensorflow as tf

from tfdist_ext.errors import StrategyError
from tfdist_ext.messages import counted
from tfdist_ext.strategies.resolvers import Described, describe

__all__ = [
    "Choices",
    "Explanation",
    "computing_tasks",
    "evaluates",
    "explain",
    "is_apart",
    "remember",
]

_LOCAL = "/job:localhost/replica:0/task:0/device:"


@dataclass(frozen=True)
class Choices:
    """What the factory knew when it made a strategy.

    Attributes:
        name: of the strategy, as `create_strategy` takes it.
        reason: why this one.
        settings: a line for each setting, with where it came from.
        considered: a line for each alternative that was not taken, with the reason.
        cluster: the one that the strategy is of; None where it is of one machine.
        apart: asked for without the cluster that the environment describes.
    """

    name: str
    reason: str
    settings: tuple[str, ...] = ()
    considered: tuple[str, ...] = ()
    cluster: Described | None = None
    apart: bool = False


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
    text: str = field(repr=False)

    def __str__(self) -> str:
        return self.text


_MADE: weakref.WeakKeyDictionary[tf.distribute.Strategy, Choices] = weakref.WeakKeyDictionary()


def remember(strategy: tf.distribute.Strategy, choices: Choices) -> None:
    _MADE[strategy] = choices


def evaluates(strategy: tf.distribute.Strategy) -> Described | None:
    """The cluster beside which this task evaluates; None in every task that trains."""
    made = _MADE.get(strategy)
    cluster = None if made is None else made.cluster
    task = None if cluster is None else cluster.task
    return cluster if task is not None and task.type == "evaluator" else None


def is_apart(strategy: tf.distribute.Strategy) -> bool:
    """Whether it was asked for without the cluster that the environment describes, on purpose."""
    made = _MADE.get(strategy)
    return made is not None and made.apart


def computing_tasks(strategy: tf.distribute.Strategy, count: int) -> list[str]:
    """The names of the tasks that compute, in the order of their replicas, as "worker 1"."""
    made = _MADE.get(strategy)
    cluster = _cluster_of(strategy) if made is None else made.cluster
    jobs = {} if cluster is None else cluster.jobs
    names = [
        f"{job} {index}" if len(jobs.get(job, ())) > 1 or job == "worker" else f"the {job}"
        for job in ("chief", "master", "worker")
        for index in range(len(jobs.get(job, ())))
    ]
    return names if len(names) == count else [f"worker {index}" for index in range(count)]


def explain(strategy: tf.distribute.Strategy) -> Explanation:
    """The choice, the signal behind it, task, replicas, devices and alternatives; prints as text.

    Raises:
        StrategyError: `strategy` is not a tf.distribute.Strategy.
    """
    if not isinstance(strategy, tf.distribute.Strategy):
        raise StrategyError(
            f"strategy must be a tf.distribute.Strategy, got {strategy!r}; give explain what"
            " create_strategy returned."
        )
    made = _MADE.get(strategy)
    if made is None:
        unknown = "it was not made by create_strategy"
        made = Choices("made elsewhere", unknown, cluster=_cluster_of(strategy))
    task = _task(strategy, made.cluster)
    rows = [
        ("strategy", [f"{made.name} ({type(strategy).__name__})"]),
        ("because", [made.reason]),
        ("settings", list(made.settings)),
        ("task", [task]),
        ("replicas", [_replicas(strategy)]),
        ("devices", [", ".join(_devices(strategy, made.cluster))]),
        ("passed over", list(made.considered)),
    ]
    lines = []
    for title, values in rows:
        for number, value in enumerate(values):
            lines.append(f"{title if number == 0 else '':<12} {value}".rstrip())
    asynchronous = isinstance(strategy, tf.distribute.ParameterServerStrategy)
    return Explanation(
        strategy=made.name,
        type=type(strategy).__name__,
        reason=made.reason,
        settings=made.settings,
        task=task,
        replicas=strategy.num_replicas_in_sync,
        devices=() if asynchronous else tuple(_listed(strategy, "worker_devices")),
        considered=made.considered,
        text="\n".join(lines),
    )


def _cluster_of(strategy: tf.distribute.Strategy) -> Described | None:
    resolver = getattr(strategy, "cluster_resolver", None)
    if resolver is None or isinstance(strategy, tf.distribute.TPUStrategy):
        return None  # a TPU's resolver asks the cloud each time
    try:
        return describe(resolver)
    except ValueError:  # not our cluster to refuse: the strategy is there
        return None


def _task(strategy: tf.distribute.Strategy, cluster: Described | None) -> str:
    if cluster is None or not cluster.jobs:
        return "this process alone"
    if cluster.task is None:
        return f"the coordinator of a cluster of {cluster}"
    if cluster.task.type == "evaluator":
        return f"{cluster.task}, beside a cluster of {cluster}"
    chief = ", the chief" if strategy.extended.should_checkpoint else ""
    return f"{cluster.task}{chief}, in a cluster of {cluster}"


def _replicas(strategy: tf.distribute.Strategy) -> str:
    if isinstance(strategy, tf.distribute.ParameterServerStrategy):
        return "each worker trains by itself (asynchronous)"
    together = strategy.num_replicas_in_sync
    here = len(_listed(strategy, "worker_devices"))
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
    computing = _listed(strategy, "worker_devices")
    if not computing:
        return ["wherever TensorFlow places an operation"]
    keeping = _listed(strategy, "parameter_devices")
    if keeping and (set(keeping) - set(computing) or len(keeping) < len(computing)):
        return [*computing, f"variables on {', '.join(keeping)}"]
    return computing


def _listed(strategy: tf.distribute.Strategy, kind: str) -> list[str]:
    """Short names; none where a strategy says nothing of devices, as the default one."""
    try:
        devices = getattr(strategy.extended, kind)
    except (AttributeError, NotImplementedError, RuntimeError):
        return []
    return [name.removeprefix(_LOCAL) for name in devices]
