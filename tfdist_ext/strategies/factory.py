"""create_strategy: from a name, or from what is there, to TensorFlow's own object."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfdist_ext import flags
from tfdist_ext.cluster import ClusterConfig, describe_environments
from tfdist_ext.cluster import tpu as tpu_environment
from tfdist_ext.cluster.tpu import TpuSignal
from tfdist_ext.errors import ClusterConfigError, StrategyError
from tfdist_ext.messages import counted
from tfdist_ext.strategies.choice import Choice, choose
from tfdist_ext.strategies.devices import how_many, make_logical_cpus, seen_devices
from tfdist_ext.strategies.explanation import remember
from tfdist_ext.strategies.registry import Entry, lookup
from tfdist_ext.strategies.resolvers import Cluster, Described, describe, describe_if_known
from tfdist_ext.strategies.settings import Settings, merge, read_file
from tfdist_ext.strategies.spanning import check_spans_cluster
from tfdist_ext.user_frames import filter_traceback

__all__ = ["create_strategy"]

_CALL, _FLAGS, _ENVIRONMENT = "the call", "flags", "the environment"
_OF_CLUSTERS = ("multi_worker_mirrored", "parameter_server")


@filter_traceback
def create_strategy(
    name: str = "auto",
    *,
    cluster: Cluster = None,
    devices: int | str | Sequence[str] | None = None,
    placement: Any = None,
    config: str | Path | None = None,
    wait: float | None = None,
    alone: bool | None = None,
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
        wait: seconds to wait for the other tasks of a cluster; None: no limit.
        alone: let each task of the cluster that the environment describes train by itself, on
            the devices of its own machine.
        options: the strategy's own: `logical_cpus` (one_device, mirrored, central_storage,
            placed, and auto on one machine), `owned_from` (placed), `cross_device_ops`
            (mirrored), `parameter_device` (central_storage), `communication`
            (multi_worker_mirrored: auto, ring, nccl), `partitioner` (parameter_server), `tpu`,
            `zone` and `project` (tpu), and those of registered strategies, to which
            `logical_cpus` belongs.

    Arguments go over flags (`tfd.flags.define_strategy_flags`), flags over the file, the file
    over the environment. `explain(strategy)` says which won.

    Returns:
        TensorFlow's object, as its own constructor returns it. A strategy for several workers
        comes back when all of them are there; meanwhile those missing are named on stderr. In an
        `evaluator` task, where a strategy of a cluster would be made: one for its own devices.

    Raises:
        SystemExit: in a `ps` or `worker` task of a cluster with parameter servers, which this
            call serves in until the coordinator has ended: 0 when it ended well, else 1.
        StrategyError: an unknown name, an option the strategy does not take, or a strategy that
            cannot run here.
        ClusterConfigError: the cluster to use is one that cannot be right. A strategy asked for
            by name that takes no cluster does not mind what the environment says of one.
    """
    arguments = dict(devices=devices, placement=placement, wait=wait, alone=alone, **options)
    if name != "auto":  # the default, which leaves the choice to flags and file
        arguments["name"] = name
    layers = _layers(arguments, config)
    settings = merge(layers)
    wanted = settings.values.get("name", "auto")
    tpu = tpu_environment.detect(os.environ)
    passed_over: list[str] = []
    try:
        alone = _check_alone(settings.values.get("alone"), wanted, cluster)
        chosen = alone or cluster is not None  # and so the environment's cluster does not count
        _check_wait(settings.values.get("wait"))
        of_cluster = wanted in ("auto", *_OF_CLUSTERS) and not alone
        found = ClusterConfig.from_env(os.environ) if of_cluster and cluster is None else None
        evaluator = _evaluator(cluster if found is None else found) if of_cluster else None
        if evaluator is not None:
            wanted = "auto"  # among its own devices: the training runs without it
        if wanted == "auto":
            choice = _automatic(found if cluster is None else cluster, tpu, settings.values)
            entry = lookup(choice.name)
            if not entry.takes("cluster"):
                cluster = None  # it describes none, or one that this task only looks at
        else:
            entry = lookup(wanted)
            because = f"it was asked for by name in {settings.where['name']}"
            takes_cluster = "cluster" in entry.signals and entry.takes("cluster") and not alone
            if cluster is None and takes_cluster:
                found = found or ClusterConfig.from_env(os.environ)
                chosen = True  # what its factory makes of the cluster
            elif cluster is None and (beaten := _not_used(os.environ)):
                because += ", over the environment"
                passed_over.append(f"{beaten}: {entry.name} does not use it")
            choice = Choice(entry.name, because)
        signals = _signals(entry, found, tpu) if cluster is None else {"cluster": cluster}
        settings = merge([*layers, (_ENVIRONMENT, signals)])
        given = {key: v for key, v in settings.values.items() if key not in ("name", "alone")}
        if not entry.takes("wait"):
            given.pop("wait", None)  # it waits for no task
        if wanted == "auto" and entry.name == "default":
            given.pop("logical_cpus", None)  # they are made: the choice counted them
        if evaluator is not None:
            given = {key: value for key, value in given.items() if not _of_training(key, entry)}
        entry.check(given, settings.where)
        strategy = entry.make(given)
        if not chosen and evaluator is None:
            check_spans_cluster(strategy, entry.name)
    except StrategyError as error:
        if elsewhere := _from_elsewhere(settings):
            raise StrategyError(f"{error} (Settings: {elsewhere}.)") from error
        raise
    if wanted == "auto" or found is not None:
        passed_over += _others(found, tpu if "tpu" in signals else None)
    choice = replace(
        choice,
        passed_over=choice.passed_over + passed_over,
        settings=tuple(_settings_lines(settings, found, config)),
        cluster=evaluator or describe_if_known(given.get("cluster")),
        apart=chosen,
    )
    remember(strategy, choice)
    return strategy


def automatic_choice(env: Mapping[str, str]) -> list[str]:
    """What "auto" would choose here, and why, a line each; nothing is made or connected."""
    try:
        found = ClusterConfig.from_env(env)
        choice = _automatic(found, tpu_environment.detect(env), {})
    except (ClusterConfigError, StrategyError) as error:
        return [f"an error: {error}"]
    passed_over = [f"passed over: {line}" for line in choice.passed_over]
    return [f"{choice.name}: {choice.because}", *passed_over]


def _check_alone(alone: object, wanted: str, cluster: Cluster) -> bool:
    if alone is not None and not isinstance(alone, bool):
        raise StrategyError(f"alone must be True or False, got {alone!r}.")
    if alone and (cluster is not None or wanted in _OF_CLUSTERS):
        other = "a cluster" if cluster is not None else f"the strategy {wanted!r}"
        raise StrategyError(
            f"alone=True must come without a cluster and its strategies, got {other} as well: each"
            " task trains by itself then. Leave one of them out."
        )
    return bool(alone)


def _check_wait(wait: Any) -> None:
    number = isinstance(wait, int | float) and not isinstance(wait, bool)
    if wait is not None and not (number and 0 < wait < 1e9):
        raise StrategyError(f"wait must be a number of seconds above 0, got {wait!r}.")


def _layers(
    arguments: Mapping[str, Any], config: str | Path | None
) -> list[tuple[str, Mapping[str, Any]]]:
    file = config if config is not None else flags.strategy_config()
    layers = [(_CALL, arguments), (_FLAGS, flags.strategy_flags())]
    return layers if file is None else [*layers, (f"the file {file}", read_file(file))]


def _automatic(cluster: Cluster, tpu: TpuSignal | None, values: Mapping[str, Any]) -> Choice:
    if isinstance(cluster, tf.distribute.cluster_resolver.TPUClusterResolver):
        return Choice("tpu", "a TPUClusterResolver was given")
    described = None if cluster is None else describe(cluster)
    evaluates = described is not None and described.is_evaluator
    alone = described is None or not described.jobs or evaluates
    if alone and tpu is None:
        make_logical_cpus(values.get("logical_cpus"))  # they count among the devices to choose from
    choice = choose(
        cluster_jobs=None if alone or described is None else list(described.jobs),
        cluster_source="" if described is None else described.source,
        tpu=None if tpu is None else tpu.name,
        devices=seen_devices,
        asked_for=how_many(values.get("devices")),
        alone=f"{described.task} works by itself" if described and evaluates else "no cluster",
    )
    if described is not None and not described.jobs:
        choice.passed_over.append(f"{described.source}: it was given, but describes no cluster")
    return choice


def _evaluator(cluster: Cluster) -> Described | None:
    """The cluster, where this task is its evaluator, which takes no part in the training."""
    described = describe_if_known(cluster)
    return described if described is not None and described.is_evaluator else None


def _of_training(option: str, chosen: Entry) -> bool:
    """Whether an option is for the strategy of the training, and not for the chosen one."""
    return not chosen.takes(option) and any(lookup(name).takes(option) for name in _OF_CLUSTERS)


def _signals(entry: Entry, found: ClusterConfig | None, tpu: TpuSignal | None) -> dict[str, Any]:
    """The options that the environment sets, of those that the strategy lets it set."""
    signals: dict[str, Any] = {"cluster": found}
    if tpu is not None:
        signals |= {"tpu": tpu.name, "zone": tpu.zone, "project": tpu.project}
    return {
        option: value
        for option, value in signals.items()
        if value is not None and option in entry.signals and entry.takes(option)
    }


def _not_used(env: Mapping[str, str]) -> str | None:
    """A cluster in the environment of a strategy that does not use it, in words."""
    try:
        found = ClusterConfig.from_env(env)
    except ClusterConfigError as error:
        return str(error)
    return None if found is None else f"the cluster of {found.source} ({_in_words(found)})"


def _others(found: ClusterConfig | None, tpu: TpuSignal | None) -> list[str]:
    """The other environments' descriptions, without the one that was used."""
    return [
        f"{name}: {text}"
        for name, text in describe_environments(os.environ)
        if not (found is not None and text == f"{_in_words(found)}, from {found.source}")
        and not (tpu is not None and name == tpu_environment.NAME)
    ]


def _settings_lines(
    settings: Settings, found: ClusterConfig | None, config: str | Path | None
) -> Iterator[str]:
    for option, line in settings.origins.items():
        if option != "cluster":
            yield line
    if found is not None:
        yield f"cluster = {_in_words(found)} from {found.source}"
    if config is not None and (beaten := flags.strategy_config()) is not None:
        yield f"config = {str(config)!r} from the call, over flags ({beaten!r})"
    if flags.not_parsed():
        yield "flags are defined, but not parsed: start main with absl.app.run(main)"


def _in_words(cluster: ClusterConfig) -> str:
    return f"{cluster.task} of {counted(cluster.num_tasks, 'task')}"


def _from_elsewhere(settings: Settings) -> str:
    """The settings that come neither from the call nor from the environment."""
    return "; ".join(
        line
        for option, line in settings.origins.items()
        if settings.where[option] not in (_CALL, _ENVIRONMENT)
    )
