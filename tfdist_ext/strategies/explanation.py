"""Why this strategy was chosen and what it runs on, in words."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from tfdist_ext.cluster.jobs import ClusterDescription
from tfdist_ext.errors import StrategyError
from tfdist_ext.messages import counted, shown
from tfdist_ext.placement.placer import ServerPlacer
from tfdist_ext.placement.rules import short_name
from tfdist_ext.strategies.cluster_tasks import describe
from tfdist_ext.strategies.owned_sums import sums_of
from tfdist_ext.user_frames import filter_traceback

CHOICE = "tfdist_choice"  # the attribute in which a strategy keeps its Choice


@dataclass(frozen=True)
class Choice:
    """The strategy that was chosen, and why.

    Attributes:
        name: of the strategy, as `create_strategy` takes it.
        because: the signal that led to it.
        passed_over: one line for each alternative that was not taken, with the reason.
        settings: one line for each setting, with where it came from.
        cluster: the cluster that the strategy, or the evaluator, belongs to.
        ignores_cluster: whether the call allows each task of a cluster to train by itself.
    """

    name: str
    because: str
    passed_over: list[str] = field(default_factory=list)
    settings: tuple[str, ...] = ()
    cluster: ClusterDescription | None = None
    ignores_cluster: bool = False


@dataclass(frozen=True)
class Explanation:
    """The reason why a strategy was chosen, and its devices. Print it to read all attributes.

    Attributes:
        strategy: the name of the strategy. The name of a strategy that `create_strategy` did not
            create is "made elsewhere".
        reason: why `create_strategy` chose the strategy.
        replicas: the number of replicas in sync over all tasks. It is 1 under
            ParameterServerStrategy, because its workers train asynchronously.
        devices: the devices of this task that compute steps. Empty for the default strategy and
            ParameterServerStrategy, which do not list their devices.
        considered: one line for each strategy that was not chosen, with the reason.
        steps: for a distributed model, one line for each step that has run. The line says whether
            all replicas of this task share one trace of the step, and if not, why. Another line
            says if BatchNormalization is not synchronized. Empty for a strategy.
        text: the text that `print` shows.
    """

    strategy: str
    reason: str
    replicas: int
    devices: tuple[str, ...]
    considered: tuple[str, ...]
    steps: tuple[str, ...]
    text: str = field(repr=False)

    def __str__(self) -> str:
        return self.text


def choice_of(strategy: tf.distribute.Strategy) -> Choice | None:
    """The choice that `create_strategy` made; None for a strategy that was made elsewhere."""
    return getattr(strategy, CHOICE, None)


def evaluates(strategy: tf.distribute.Strategy) -> ClusterDescription | None:
    """The cluster beside which this task evaluates; None in every task that trains."""
    cluster = _cluster_of(strategy)
    return cluster if cluster is not None and cluster.is_evaluator else None


def computing_tasks(strategy: tf.distribute.Strategy, count: int) -> list[str]:
    """The names of the tasks that compute, in the order of their replicas, as "worker 1"."""
    cluster = _cluster_of(strategy)
    jobs = {} if cluster is None else cluster.jobs
    names = [
        f"{job} {index}" if len(jobs.get(job, ())) > 1 or job == "worker" else f"the {job}"
        for job in ("chief", "worker")
        for index in range(len(jobs.get(job, ())))
    ]
    return names if len(names) == count else [f"worker {index}" for index in range(count)]


@filter_traceback
def explain(strategy: Any) -> Explanation:
    """Explains why a strategy was chosen, and lists its replicas and devices.

    Args:
        strategy: a `tf.distribute.Strategy`, or a distributed model. The explanation of a model
            also describes how its steps are traced.

    Returns:
        An `Explanation`, to be printed.

    Raises:
        StrategyError: `strategy` is neither a strategy nor a distributed model.
    """
    steps: list[str] = []
    if hasattr(strategy, "_tfdist_explained"):  # the method of a distributed model
        strategy, steps = strategy._tfdist_explained()
    if not isinstance(strategy, tf.distribute.Strategy):
        raise StrategyError(
            f"explain takes the result of create_strategy or distribute, not {shown(strategy)}."
        )
    choice = choice_of(strategy) or Choice("made elsewhere", "it was not made by create_strategy")
    cluster = _cluster_of(strategy)
    placer = getattr(strategy, "placer", None)
    devices, replicas, places = _computing(strategy, cluster)
    shared = "state sharded across workers (shard_optimizer=True)"
    sums = sums_of(strategy)
    narrow = sums.narrow
    threads = tf.config.threading.get_intra_op_parallelism_threads()  # 0: as many as cores
    rows = [
        ("strategy", [f"{choice.name} ({type(strategy).__name__})"]),
        ("because", [choice.because]),
        ("settings", choice.settings),
        ("task", [_task(strategy, cluster)]),
        ("replicas", [replicas]),
        ("devices", [places]),
        ("placement", [str(placer)] if isinstance(placer, ServerPlacer) else []),
        ("optimizer", [shared] if sums.owned else []),
        ("gradients", [f"travel as {narrow.dtype.name} (gradient_dtype)"] if narrow else []),
        ("threads", [f"at most {threads} in an operation on a CPU"] if threads else []),
        ("steps", steps),
        ("passed over", choice.passed_over),
    ]
    text = "\n".join(
        f"{'' if number else title:<12} {value}".rstrip()
        for title, values in rows
        for number, value in enumerate(values)
    )
    return Explanation(
        strategy=choice.name,
        reason=choice.because,
        replicas=strategy.num_replicas_in_sync,
        devices=tuple(devices),
        considered=tuple(choice.passed_over),
        steps=tuple(steps),
        text=text,
    )


def _computing(
    strategy: tf.distribute.Strategy, cluster: ClusterDescription | None
) -> tuple[list[str], str, str]:
    """(devices of this task that compute steps, replicas in words, all devices in words)."""
    if isinstance(strategy, tf.distribute.ParameterServerStrategy):
        jobs = {} if cluster is None else cluster.jobs
        workers = counted(len(jobs.get("worker", ())), "worker")
        places = f"variables on {len(jobs.get('ps', ()))} ps, computing on {workers}"
        return [], "each worker trains by itself (asynchronous)", places
    together = strategy.num_replicas_in_sync
    devices = list(map(short_name, devices_listed(strategy, "worker_devices")))
    elsewhere = f", {len(devices)} of them on this task" if len(devices) != together else ""
    replicas = f"{together} in sync{elsewhere}" if devices else str(together)
    return devices, replicas, _places(strategy, devices)


def _cluster_of(strategy: tf.distribute.Strategy) -> ClusterDescription | None:
    if (choice := choice_of(strategy)) is not None:
        return choice.cluster
    return describe(getattr(strategy, "cluster_resolver", None))


def _task(strategy: tf.distribute.Strategy, cluster: ClusterDescription | None) -> str:
    if cluster is None or not cluster.jobs:
        return "a single process"
    if cluster.task is None:
        return f"the coordinator of a cluster of {cluster}"
    if cluster.is_evaluator:
        return f"{cluster.task}, outside a cluster of {cluster}"
    chief = ", the chief" if strategy.extended.should_checkpoint else ""
    return f"{cluster.task}{chief}, in a cluster of {cluster}"


def _places(strategy: tf.distribute.Strategy, computing: list[str]) -> str:
    if not computing:
        return "wherever TensorFlow places an operation"
    keeping = list(map(short_name, devices_listed(strategy, "parameter_devices")))
    if keeping and (set(keeping) - set(computing) or len(keeping) < len(computing)):
        computing = [*computing, f"variables on {', '.join(keeping)}"]
    return ", ".join(computing)


def devices_listed(strategy: tf.distribute.Strategy, kind: str) -> list[str]:
    """The names of a strategy's devices; none for the default strategy, which lists none."""
    try:
        return list(getattr(strategy.extended, kind))
    except (AttributeError, NotImplementedError, RuntimeError):
        return []
