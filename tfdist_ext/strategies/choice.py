"""Which strategy to make, from a name and what surrounds this process: pure functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tfdist_ext.errors import StrategyError

if TYPE_CHECKING:
    from tfdist_ext.strategies.resolvers import Described

__all__ = ["OF_CLUSTERS", "Choice", "Environment", "choose"]

# The strategies that cannot be made without a cluster of this package's kind.
OF_CLUSTERS = ("multi_worker_mirrored", "parameter_server")


@dataclass(frozen=True)
class Environment:
    """What surrounds this process, as far as the choice depends on it.

    Attributes:
        devices: lists the devices of this machine, as "GPU:0". Called only if the choice depends
            on them, because listing devices starts TensorFlow.
        cluster: the cluster that was given or found. None: no cluster, or the strategy uses none.
        is_given: whether a cluster was passed to the call.
        is_alone: whether each task of a cluster is to train by itself.
        unused: a cluster in the environment that the named strategy does not use, in words.
        tpu: the signal of a TPU in words, "" without one.
        asked_for: how many devices `devices=` asks for, None if it was not given.
        others: a line for each place that could have described a cluster or a TPU.
    """

    devices: Callable[[], Sequence[str]]
    cluster: Described | None = None
    is_given: bool = False
    is_alone: bool = False
    unused: str = ""
    tpu: str = ""
    asked_for: int | None = None
    others: tuple[str, ...] = ()

    @property
    def is_evaluator(self) -> bool:
        """Whether this task evaluates beside a cluster, and does not train."""
        return self.cluster is not None and self.cluster.is_evaluator


@dataclass(frozen=True)
class Choice:
    """Which strategy was chosen, and what was known then.

    Attributes:
        name: of the strategy, as `create_strategy` takes it.
        because: the signal that led to it.
        passed_over: a line for each alternative that was not taken, with the reason.
        settings: a line for each setting, with where it came from.
        cluster: the cluster that the strategy, or the evaluator, belongs to.
        apart: whether the call says what becomes of the environment's cluster.
    """

    name: str
    because: str
    passed_over: list[str] = field(default_factory=list)
    settings: tuple[str, ...] = ()
    cluster: Described | None = None
    apart: bool = False


def choose(name: str, asked_in: str, environment: Environment) -> Choice:
    """Choose the named strategy, or the one that the most specific signal asks for.

    The evaluator of a cluster gets a strategy for its own devices if a strategy of the cluster was
    asked for, because the training runs without it.

    Args:
        name: of a strategy, or "auto".
        asked_in: where the name comes from, for messages.

    Raises:
        StrategyError: `alone` together with a cluster, or with a strategy that needs one.
    """
    if environment.is_alone and (environment.is_given or name in OF_CLUSTERS):
        other = "a cluster" if environment.is_given else f"the strategy {name!r}"
        raise StrategyError(
            f"alone=True must come without a cluster and its strategies, got {other} as well: each"
            " task trains by itself then. Leave one of them out."
        )
    if name == "auto" or (environment.is_evaluator and name in OF_CLUSTERS):
        return _automatic(environment)
    passed_over = [f"{environment.unused}: {name} does not use it"] if environment.unused else []
    return Choice(name, f"it was asked for by name in {asked_in}", passed_over)


def _automatic(environment: Environment) -> Choice:
    """The most specific signal: a cluster, then a TPU, then this machine's devices."""
    cluster, passed_over = environment.cluster, list[str]()
    if cluster is not None and cluster.jobs and not cluster.is_evaluator:
        jobs = ", ".join(cluster.jobs)
        if "ps" in cluster.jobs:
            chosen, because = "parameter_server", f"{cluster.source} has ps tasks ({jobs})"
        else:
            passed_over.append("parameter_server: the cluster has no ps tasks")
            chosen = "multi_worker_mirrored"
            because = f"{cluster.source} describes a cluster ({jobs})"
    else:
        if cluster is None:
            why = "no cluster"
        elif cluster.is_evaluator:
            why = f"{cluster.task} works by itself"
        else:
            why = f"{cluster.source} was given, but describes no cluster"
        passed_over.append(f"multi_worker_mirrored, parameter_server: {why}")
        chosen, because = _of_one_machine(environment, passed_over)
        because += "" if chosen == "tpu" else f", {why}"
    return Choice(chosen, because, [*passed_over, *environment.others])


def _of_one_machine(environment: Environment, passed_over: list[str]) -> tuple[str, str]:
    """The strategy of a process without a cluster, and why; notes what was passed over."""
    if (count := environment.asked_for) is not None:
        # devices= is about this machine, even if the environment names a TPU.
        if environment.tpu:
            passed_over.append(f"tpu: {environment.tpu}, but devices= was given")
        name = "mirrored" if count > 1 else "one_device"
        return name, f"devices= asks for {count} on this machine"
    if environment.tpu:
        return "tpu", environment.tpu
    passed_over.append("tpu: no TPU is named")
    seen = environment.devices()
    gpus, cpus = (sum(name.startswith(kind) for name in seen) for kind in ("GPU:", "CPU:"))
    if gpus > 1:
        return "mirrored", f"{gpus} GPUs on this machine"
    if gpus:
        passed_over.append("mirrored: one GPU only")
        return "one_device", "one GPU on this machine"
    passed_over.append("mirrored on GPUs: there are none")
    if cpus > 1:
        return "mirrored", f"{cpus} logical CPUs on this machine"
    passed_over.append("mirrored on CPUs: one logical CPU only")
    return "default", "one CPU on this machine"
