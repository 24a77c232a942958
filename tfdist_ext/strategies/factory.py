"""create_strategy: from a name, or from what is there, to TensorFlow's own object."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfdist_ext import flags
from tfdist_ext.cluster import ClusterConfig, survey
from tfdist_ext.cluster import tpu as tpu_environment
from tfdist_ext.strategies.choice import Choice, choose
from tfdist_ext.strategies.devices import make_logical_cpus, seen_devices
from tfdist_ext.strategies.explanation import Explanation, remember
from tfdist_ext.strategies.makers import resolver_of
from tfdist_ext.strategies.registry import lookup
from tfdist_ext.strategies.settings import merge, read_file

__all__ = ["create_strategy"]


def create_strategy(
    name: str = "auto",
    *,
    cluster: Any = None,
    devices: Any = None,
    placement: Any = None,
    config: str | Path | None = None,
    **options: Any,
) -> tf.distribute.Strategy:
    """Make a `tf.distribute` strategy.

    Args:
        name: one of `available_strategies()`, or "auto": a cluster, a TPU or the devices of this
            machine, whichever is there.
        cluster: a ClusterConfig or any TensorFlow ClusterResolver; by default what the
            environment describes (TF_CONFIG, Slurm, Kubernetes, SageMaker, Open MPI).
        devices: names ("GPU:0") or a number of devices, for strategies on one machine.
        placement: where variables live, for strategies that take it.
        config: a TOML file whose [strategy] table holds any of these settings.
        options: the strategy's own: `logical_cpus` (one_device, mirrored, central_storage),
            `cross_device_ops` (mirrored), `parameter_device` (central_storage),
            `communication` (multi_worker_mirrored: auto, ring, nccl), `partitioner`
            (parameter_server), `zone` and `project` (tpu), and those of registered strategies.

    Arguments go over flags (`tfd.flags.define_strategy_flags`), flags over the file, the file
    over the environment. `explain(strategy)` says which won.

    Returns:
        TensorFlow's object, as its own constructor returns it. A strategy for several workers
        comes back when all of them are there; meanwhile those missing are named on stderr.

    Raises:
        StrategyError: an unknown name, an option the strategy does not take, or a strategy that
            cannot run here.
        ClusterConfigError: the environment describes a cluster that cannot be right.
    """
    arguments = {
        "name": None if name == "auto" else name,
        "devices": devices,
        "placement": placement,
        **options,
    }
    file = config or flags.strategy_config()
    settings = merge(
        [
            ("the call", arguments),
            ("flags", flags.strategy_flags()),
            (f"the file {file}", read_file(file) if file else {}),
        ]
    )
    wanted = dict(settings.values)
    wanted_name = wanted.pop("name", "auto")
    found = None if cluster is not None else ClusterConfig.from_env(os.environ)
    tpu = tpu_environment.detect(os.environ)
    if wanted_name == "auto":
        choice = _choose(cluster or found, tpu, wanted.get("logical_cpus"))
    else:
        choice = Choice(wanted_name, f"it was asked for by name ({_origin(settings.origins)})")
    entry = lookup(choice.name)
    if choice.name == "tpu" and cluster is None and tpu is not None:
        wanted = {"name": tpu.name, "zone": tpu.zone, "project": tpu.project} | wanted
    if cluster is not None:
        wanted["cluster"] = cluster
    entry.check(wanted)
    if found is not None and entry.takes("cluster"):
        wanted["cluster"] = found
    strategy = entry.factory(**wanted)
    looked_at = [f"{environment}: {text}" for environment, text in survey(os.environ)]
    if found is not None and "cluster" not in wanted:
        looked_at.insert(0, f"the cluster of {found.source}: {choice.name} uses this process alone")
    explanation = Explanation(
        choice.name, choice.because, settings.origins, (*choice.passed_over, *looked_at)
    )
    remember(strategy, explanation)
    return strategy


def _choose(cluster: Any, tpu: Any, logical_cpus: int | None) -> Choice:
    if isinstance(cluster, tf.distribute.cluster_resolver.TPUClusterResolver):
        return Choice("tpu", "a TPUClusterResolver was given")
    jobs = None if cluster is None else list(resolver_of(cluster).cluster_spec().as_dict())
    if jobs is not None and not jobs:
        jobs = None  # TensorFlow's resolvers describe "no cluster" as an empty one
    if jobs is None and tpu is None and logical_cpus is not None:
        make_logical_cpus(logical_cpus)  # they count among the devices to choose from
    return choose(
        cluster_jobs=jobs,
        cluster_source=getattr(cluster, "source", None) or type(cluster).__name__,
        tpu=tpu.name if tpu is not None else None,
        devices=seen_devices,
    )


def _origin(origins: tuple[str, ...]) -> str:
    return next((line for line in origins if line.startswith("name = ")), "name")
