"""create_strategy: describe the environment, choose, construct."""

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
from tfdist_ext.errors import ClusterConfigError, StrategyError
from tfdist_ext.messages import counted
from tfdist_ext.strategies.choice import OF_CLUSTERS, Choice, Environment, choose
from tfdist_ext.strategies.devices import how_many, make_logical_cpus, seen_devices
from tfdist_ext.strategies.explanation import devices_listed, remember
from tfdist_ext.strategies.registry import lookup
from tfdist_ext.strategies.resolvers import Cluster, describe, describe_if_known
from tfdist_ext.strategies.settings import Settings, read_file
from tfdist_ext.user_frames import filter_traceback

__all__ = ["automatic_choice", "check_spans_cluster", "create_strategy"]

_CALL, _ENVIRONMENT = "the call", "the environment"


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
        wait: seconds to wait for the other tasks of a cluster; None: 300.
        alone: let each task of the cluster that the environment describes train by itself, on
            the devices of its own machine.
        options: the strategy's own: `logical_cpus` (one_device, mirrored, central_storage,
            placed, and auto on one machine), `owned_from` (placed), `parameter_device`
            (central_storage), `communication` (multi_worker_mirrored: auto, ring, nccl),
            `partitioner` (parameter_server), `tpu`, `zone` and `project` (tpu), and those of
            registered strategies, to which `logical_cpus` belongs.

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
    settings = Settings()
    settings.add(_CALL, arguments)
    settings.add("flags", flags.strategy_flags())
    if (file := flags.strategy_config() if config is None else config) is not None:
        settings.add(f"the file {file}", read_file(file))
    try:
        _check_values(settings.values)
        wanted = settings.values.get("name", "auto")
        environment, used = _describe(wanted, cluster, settings.values)
        choice = choose(wanted, settings.where.get("name", _CALL), environment)
        return _construct(choice, environment, used, settings)
    except StrategyError as error:
        if elsewhere := _from_flags_and_file(settings):
            raise StrategyError(f"{error} (Settings: {elsewhere}.)") from error
        raise


def automatic_choice(env: Mapping[str, str]) -> list[str]:
    """What "auto" would choose here, and why, one line each; nothing is made or connected."""
    try:
        found = ClusterConfig.from_env(env)
        choice = choose("auto", _CALL, _environment("auto", found, {}, env))
    except (ClusterConfigError, StrategyError) as error:
        return [f"an error: {error}"]
    passed_over = [f"passed over: {line}" for line in choice.passed_over]
    return [f"{choice.name}: {choice.because}", *passed_over]


def _check_values(values: Mapping[str, Any]) -> None:
    """Raise StrategyError for a wrong value of a setting that every strategy takes."""
    alone, wait = values.get("alone"), values.get("wait")
    if not isinstance(alone, bool | None):
        raise StrategyError(f"alone must be True or False, got {alone!r}.")
    is_number = isinstance(wait, int | float) and not isinstance(wait, bool)
    if wait is not None and not (is_number and 0 < wait < 1e9):
        raise StrategyError(f"wait must be a number of seconds above 0, got {wait!r}.")


def _describe(
    wanted: str, given: Cluster, values: Mapping[str, Any]
) -> tuple[Environment, Cluster]:
    """Step 1: what surrounds this process, and the cluster that was given or found.

    Raises:
        StrategyError: no strategy has that name, or `given` is no cluster.
        ClusterConfigError: the strategy uses the environment's cluster, which cannot be right.
    """
    env = os.environ
    takes_cluster = wanted == "auto" or lookup(wanted).takes_found_cluster
    finds_cluster = takes_cluster and given is None and not values.get("alone")
    cluster = ClusterConfig.from_env(env) if finds_cluster else given
    environment = _environment(wanted, cluster, values, env)
    unused = "" if takes_cluster or given is not None else _cluster_in_words(env)
    return replace(environment, is_given=given is not None, unused=unused), cluster


def _environment(
    wanted: str, cluster: Cluster, values: Mapping[str, Any], env: Mapping[str, str]
) -> Environment:
    def devices() -> list[str]:
        make_logical_cpus(values.get("logical_cpus"))
        return seen_devices()

    signal = tpu_environment.detect(env)
    tpu = "" if signal is None else f"the environment names the TPU {signal.name!r}"
    asked_for = how_many(values.get("devices"))
    if isinstance(cluster, tf.distribute.cluster_resolver.TPUClusterResolver):
        described, tpu, asked_for = None, "a TPUClusterResolver was given", None
    elif wanted == "auto" and cluster is not None:
        described = describe(cluster)
    else:
        described = describe_if_known(cluster)  # a registered strategy has its own kind of cluster
    used = "" if described is None else f"from {described.source}"
    others = [
        f"{place}: {text}"
        for place, text in describe_environments(env)
        if place != tpu_environment.NAME and not (used and text.endswith(used))
    ]
    return Environment(
        devices=devices,
        cluster=described,
        is_alone=bool(values.get("alone")),
        tpu=tpu,
        asked_for=asked_for,
        others=tuple(others),
    )


def _construct(
    choice: Choice, environment: Environment, cluster: Cluster, settings: Settings
) -> tf.distribute.Strategy:
    """Step 3: the strategy, made with the options that it takes, and remembered for `explain`."""
    entry = lookup(choice.name)
    named = settings.values.get("name", "auto")
    gets_cluster = cluster is not None and (
        entry.name == named
        or entry.takes_found_cluster
        or isinstance(cluster, tf.distribute.cluster_resolver.TPUClusterResolver)
    )
    signal = tpu_environment.detect(os.environ)
    if entry.name == "tpu" and signal is not None and not gets_cluster:
        found = {"tpu": signal.name, "zone": signal.zone, "project": signal.project}
        settings.add(_ENVIRONMENT, found)
    dropped = {"name", "alone", "wait"} - entry.options
    if environment.is_evaluator:
        dropped |= {option for name in OF_CLUSTERS for option in lookup(name).options}
        dropped -= entry.options
    if entry.name == "default" != named:
        dropped.add("logical_cpus")  # they are made already: the choice counted them
    options = {key: value for key, value in settings.values.items() if key not in dropped}
    if gets_cluster:
        options["cluster"] = cluster
    entry.check(options)
    apart = (
        environment.is_alone
        or environment.is_given
        or (entry.name == named and entry.takes_found_cluster)
    )
    strategy = entry.make(options)
    if not apart:
        check_spans_cluster(strategy, entry.name)
    known = environment.cluster if gets_cluster or environment.is_evaluator else None
    lines = tuple(_settings_lines(settings, cluster if not environment.is_given else None))
    remember(strategy, replace(choice, settings=lines, cluster=known, apart=apart))
    return strategy


def _settings_lines(settings: Settings, found: Cluster) -> Iterator[str]:
    yield from settings.lines.values()
    if isinstance(found, ClusterConfig):
        yield f"cluster = {_in_words(found)} from {found.source}"
    if flags.not_parsed():
        yield "flags are defined, but not parsed: start main with absl.app.run(main)"


def _cluster_in_words(env: Mapping[str, str]) -> str:
    """The environment's cluster, or what is wrong with it; "" without one."""
    try:
        found = ClusterConfig.from_env(env)
    except ClusterConfigError as error:
        return str(error)
    return "" if found is None else f"the cluster of {found.source} ({_in_words(found)})"


def _in_words(cluster: ClusterConfig) -> str:
    return f"{cluster.task} of {counted(cluster.num_tasks, 'task')}"


def _from_flags_and_file(settings: Settings) -> str:
    """The settings that come neither from the call nor from the environment."""
    places = (_CALL, _ENVIRONMENT)
    return "; ".join(
        line for option, line in settings.lines.items() if settings.where[option] not in places
    )


def check_spans_cluster(strategy: tf.distribute.Strategy, name: str) -> None:
    """Check that no task of a cluster would train a model of its own without being told to.

    Args:
        name: of the strategy, for the message.

    Raises:
        StrategyError: the environment describes a cluster in which several tasks train, and the
            strategy has no replica on the others.
    """
    try:
        cluster = ClusterConfig.from_env(os.environ)
    except ClusterConfigError:
        return  # nobody knows what it is
    if cluster is None or cluster.task.type == "evaluator" or _spans_tasks(strategy):
        return
    training = [str(task) for task in cluster.tasks() if task.type != "evaluator"]
    if len(training) < 2:
        return
    for_cluster = "parameter_server" if "ps" in cluster.jobs else "multi_worker_mirrored"
    raise StrategyError(
        f"in a cluster the strategy must span its tasks, got {name!r}, which has replicas on this"
        f" machine alone: {cluster.source} lists {len(training)} tasks"
        f" ({', '.join(training[:5])}{', ...' if len(training) > 5 else ''}), and each would train"
        f" a model of its own. Use create_strategy() or create_strategy({for_cluster!r}). If each"
        " task is to train by itself, say so with create_strategy(..., alone=True), or"
        " distribute(..., alone=True) for a strategy made elsewhere."
    )


def _spans_tasks(strategy: tf.distribute.Strategy) -> bool:
    if isinstance(strategy, tf.distribute.ParameterServerStrategy | tf.distribute.TPUStrategy):
        return True
    here = len(devices_listed(strategy, "worker_devices")) or 1  # the default strategy lists none
    return strategy.num_replicas_in_sync > here
