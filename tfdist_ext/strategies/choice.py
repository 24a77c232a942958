"""Steps 1 and 2 of `create_strategy`: describe the environment, and choose a strategy for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral

import tensorflow as tf

from tfdist_ext.cluster import describe_environments
from tfdist_ext.cluster import tpu as tpu_environment
from tfdist_ext.strategies.devices import seen_devices
from tfdist_ext.strategies.resolvers import Cluster, Described, describe

__all__ = ["CLUSTER_STRATEGIES", "Choice", "Environment", "choose", "describe_environment"]

# Strategies that need a cluster. The cluster may have an evaluator.
CLUSTER_STRATEGIES = ("multi_worker_mirrored", "parameter_server")


@dataclass(frozen=True)
class Environment:
    """Everything around this process that the choice depends on.

    Attributes:
        devices: lists the devices of this machine, as "GPU:0". Called only if the choice depends
            on them, because listing devices starts TensorFlow.
        cluster: the cluster that was given or found. None: no cluster, or the strategy uses none.
        tpu: where a TPU is named; "" without a TPU.
        asked_for: the number of devices that `devices=` asks for; None if it was not given.
        others: one line for each place that could have described a cluster.
    """

    devices: Callable[[], Sequence[str]]
    cluster: Described | None = None
    tpu: str = ""
    asked_for: int | None = None
    others: tuple[str, ...] = ()

    @property
    def is_evaluator(self) -> bool:
        """Whether this task evaluates beside a cluster, and does not train."""
        return self.cluster is not None and self.cluster.is_evaluator


def describe_environment(cluster: Cluster, devices: object, env: Mapping[str, str]) -> Environment:
    """Step 1: describe what surrounds this process.

    Args:
        cluster: the cluster that was given or found.
        devices: the setting `devices`.
        env: the environment's variables.

    Raises:
        StrategyError: `cluster` is not a cluster.
        ClusterConfigError: `cluster` cannot be right.
    """
    signal = tpu_environment.detect(env)
    tpu = "" if signal is None else f"the environment names the TPU {signal.name!r}"
    asked_for = None
    if isinstance(devices, Integral):
        asked_for = int(devices)
    elif devices is not None:
        asked_for = len(devices) if isinstance(devices, list | tuple) else 1
    if isinstance(cluster, tf.distribute.cluster_resolver.TPUClusterResolver):
        tpu, asked_for = "a TPUClusterResolver was given", None
    described = describe(cluster)
    source = "" if described is None else f"from {described.source}"
    others = tuple(
        f"{place}: {text}"
        for place, text in describe_environments(env)
        if place != tpu_environment.NAME and not (source and text.endswith(source))
    )
    return Environment(seen_devices, described, tpu, asked_for, others)


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
    cluster: Described | None = None
    ignores_cluster: bool = False


def choose(name: str, asked_in: str, environment: Environment) -> Choice:
    """Step 2: choose the named strategy, or the one that the most specific signal asks for.

    The evaluator of a cluster gets a strategy for its own devices if a strategy of the cluster was
    asked for, because the training runs without it.

    Args:
        name: of a strategy, or "auto".
        asked_in: where the name comes from, for messages.
    """
    cluster, passed_over = environment.cluster, list[str]()
    if name != "auto" and not (environment.is_evaluator and name in CLUSTER_STRATEGIES):
        return Choice(name, f"it was asked for by name in {asked_in}")
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
        chosen, because = _for_one_machine(environment, passed_over)
        because += "" if chosen == "tpu" else f", {why}"
    return Choice(chosen, because, [*passed_over, *environment.others])


def _for_one_machine(environment: Environment, passed_over: list[str]) -> tuple[str, str]:
    """The strategy of a process without a cluster, and why; adds to `passed_over`."""
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
