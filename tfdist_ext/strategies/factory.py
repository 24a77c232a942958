"""create_strategy: collect settings, describe the environment, choose, construct."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfdist_ext import flags
from tfdist_ext.cluster import ClusterConfig
from tfdist_ext.cluster import tpu as tpu_environment
from tfdist_ext.errors import ClusterConfigError, StrategyError
from tfdist_ext.messages import counted
from tfdist_ext.strategies.choice import (
    CLUSTER_STRATEGIES,
    choose,
    describe_environment,
)
from tfdist_ext.strategies.devices import make_logical_cpus
from tfdist_ext.strategies.explanation import choice_of, devices_listed, remember
from tfdist_ext.strategies.registry import lookup
from tfdist_ext.strategies.resolvers import Cluster
from tfdist_ext.user_frames import filter_traceback

__all__ = ["Settings", "automatic_choice", "check_spans_cluster", "create_strategy"]

_CALL = "the call"


@dataclass
class Settings:
    """Settings from several places; the first place that sets an option wins.

    Attributes:
        values: option -> the value that won.
        places: option -> where this value came from.
    """

    values: dict[str, Any] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)

    def add(self, place: str, given: Mapping[str, Any]) -> None:
        """Add the settings of a place with lower precedence. A value of None sets nothing."""
        for option, value in given.items():
            if value is not None and option not in self.values:
                self.values[option], self.places[option] = value, place

    def lines(self, without: str = "") -> Iterator[str]:
        """One line for each option, with its value and where the value came from.

        Args:
            without: a place; options that were set there are left out.
        """
        for option, value in self.values.items():
            if self.places[option] != without:
                text = repr(value)
                shown = type(value).__name__ if text.startswith("<") else text
                yield f"{option} = {shown} from {self.places[option]}"


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
        name: one of `available_strategies()`, or "auto": a strategy for the cluster, the TPU or
            the devices of this machine, whichever is there.
        cluster: a ClusterConfig or any TensorFlow ClusterResolver; by default what the
            environment describes (TF_CONFIG, Slurm, Kubernetes, SageMaker, Open MPI).
        devices: names ("GPU:0") or a number of devices, for strategies on one machine.
        placement: where variables live, for `placed` and `parameter_server`.
        config: a TOML file whose [strategy] table holds any of these settings.
        wait: seconds to wait for the other tasks of a cluster; 300 by default.
        alone: let each task of the cluster that the environment describes train by itself, on
            the devices of its own machine.
        options: the strategy's own: `logical_cpus` (all strategies of one machine),
            `owned_from` (placed), `parameter_device` (central_storage), `communication`
            (multi_worker_mirrored: auto, ring, nccl), `tpu`, `zone` and `project` (tpu), and those
            of registered strategies.

    Arguments take precedence over flags (`tfd.flags.define_strategy_flags`), flags over the file,
    the file over the environment. `explain(strategy)` says where each setting came from.

    Returns:
        TensorFlow's object, as its own constructor returns it. A strategy for several workers is
        returned when all of them are there; until then missing workers are named on stderr. An
        `evaluator` task gets a strategy for its own devices instead of one for the cluster.

    Raises:
        SystemExit: in a `ps` or `worker` task of a cluster with parameter servers. This call
            serves there until the coordinator has ended. The status is 0 if the coordinator ended
            well, else 138.
        StrategyError: an unknown name, an option the strategy does not take, or a strategy that
            cannot run here.
        ClusterConfigError: the cluster cannot be right. A strategy of one machine that is asked
            for by name ignores the environment's cluster.
    """
    arguments = dict(devices=devices, placement=placement, wait=wait, alone=alone, **options)
    # "auto" is the default, which leaves the choice to flags and file.
    settings = _all_settings({"name": None if name == "auto" else name, **arguments}, config)
    try:
        return _create(settings, cluster)
    except StrategyError as error:
        if elsewhere := "; ".join(settings.lines(without=_CALL)):
            raise StrategyError(f"{error} (Settings: {elsewhere}.)") from error
        raise


def _all_settings(arguments: Mapping[str, Any], config: str | Path | None) -> Settings:
    """The arguments of the call, the flags, and the settings file of the call or of the flags."""
    of_flags = flags.strategy_flags()
    file_of_flags = of_flags.pop("config", None)
    file = file_of_flags if config is None else config
    settings = Settings()
    settings.add(_CALL, arguments)
    settings.add("flags", of_flags)
    if file is not None:
        settings.add(f"the file {file}", _read_file(file))
    return settings


def _read_file(path: str | Path) -> dict[str, Any]:
    """The [strategy] table of a TOML file.

    Raises:
        StrategyError: the file cannot be read, is not TOML, or has no [strategy] table.
    """
    try:
        document = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError) as error:  # TOMLDecodeError is a ValueError
        raise StrategyError(
            f"the settings file {path!r} cannot be read as TOML: {error}"
        ) from error
    table = document.get("strategy")
    if not isinstance(table, dict):
        raise StrategyError(
            f"{path} must have a [strategy] table, got {', '.join(document) or 'nothing'}."
        )
    return table


def _create(settings: Settings, given: Cluster) -> tf.distribute.Strategy:
    values = settings.values
    _check_values(values, given)
    name, alone = values.get("name", "auto"), bool(values.get("alone"))
    cluster = given
    takes_cluster = name == "auto" or (name != "tpu" and "cluster" in lookup(name).options)
    if given is None and takes_cluster and not alone:
        cluster = ClusterConfig.from_env(os.environ)
    if "logical_cpus" in values:
        make_logical_cpus(values["logical_cpus"])
    environment = describe_environment(cluster, values.get("devices"), os.environ)
    choice = choose(name, settings.places.get("name", _CALL), environment)
    signal = tpu_environment.detect(os.environ)
    if choice.name == "tpu" and given is None and "tpu" not in values and signal is not None:
        found = {"tpu": signal.name, "zone": signal.zone, "project": signal.project}
        settings.add("the environment", found)
    gets_cluster = cluster is not None and (
        choice.name in (name, *CLUSTER_STRATEGIES)
        or isinstance(cluster, tf.distribute.cluster_resolver.TPUClusterResolver)
    )
    options = _options(choice.name, values, environment.is_evaluator)
    strategy = lookup(choice.name).make(
        {**options, **({"cluster": cluster} if gets_cluster else {})}
    )
    lines = list(settings.lines())
    if given is None and isinstance(cluster, ClusterConfig):
        tasks = counted(cluster.num_tasks, "task")
        lines.append(f"cluster = {cluster.task} of {tasks} from {cluster.source}")
    choice = replace(
        choice,
        settings=tuple(lines),
        cluster=environment.cluster if gets_cluster or environment.is_evaluator else None,
        ignores_cluster=alone or given is not None or gets_cluster,
    )
    remember(strategy, choice)
    check_spans_cluster(strategy)
    return strategy


def automatic_choice(env: Mapping[str, str]) -> list[str]:
    """What "auto" would choose here, and why, one line each; nothing is made or connected."""
    try:
        found = ClusterConfig.from_env(env)
        choice = choose("auto", _CALL, describe_environment(found, None, env))
    except (ClusterConfigError, StrategyError) as error:
        return [f"an error: {error}"]
    passed_over = [f"passed over: {line}" for line in choice.passed_over]
    return [f"{choice.name}: {choice.because}", *passed_over]


def _check_values(values: Mapping[str, Any], given: Cluster) -> None:
    """Raise StrategyError for a wrong value of a setting that every strategy takes."""
    alone, wait, name = values.get("alone"), values.get("wait"), values.get("name")
    if not isinstance(alone, bool | None):
        raise StrategyError(f"alone must be True or False, got {alone!r}.")
    if alone and (given is not None or name in CLUSTER_STRATEGIES):
        raise StrategyError(
            "alone=True makes each task train by itself, so it cannot be combined with"
            f" {'a cluster' if given is not None else f'the strategy {name!r}'}. Leave one of them"
            " out."
        )
    is_number = isinstance(wait, int | float) and not isinstance(wait, bool)
    if wait is not None and not (is_number and 0 < wait < 1e9):
        raise StrategyError(f"wait must be a number of seconds above 0, got {wait!r}.")


def _options(chosen: str, values: Mapping[str, Any], is_evaluator: bool) -> dict[str, Any]:
    """The settings that are options of the chosen strategy, without those of `create_strategy`."""
    dropped = {"name", "alone", "wait"}
    if chosen not in (*CLUSTER_STRATEGIES, "tpu"):
        dropped.add("logical_cpus")
    if is_evaluator:
        dropped.update(option for each in CLUSTER_STRATEGIES for option in lookup(each).options)
    dropped -= {*lookup(chosen).options}
    return {option: value for option, value in values.items() if option not in dropped}


def check_spans_cluster(strategy: tf.distribute.Strategy) -> None:
    """Check that no task of a cluster would train a separate model by mistake.

    Raises:
        StrategyError: the environment describes a cluster in which several tasks train, the
            strategy has no replica on the other tasks, and nobody asked for separate models.
    """
    choice = choice_of(strategy)
    if _spans_tasks(strategy) or (choice is not None and choice.ignores_cluster):
        return
    try:
        cluster = ClusterConfig.from_env(os.environ)
    except ClusterConfigError:
        return  # a strategy of one machine ignores the cluster
    if cluster is None or cluster.task.type == "evaluator":
        return
    count = sum(task.type != "evaluator" for task in cluster.tasks())
    if count < 2:
        return
    name = type(strategy).__name__ if choice is None else choice.name
    for_cluster = "parameter_server" if "ps" in cluster.jobs else "multi_worker_mirrored"
    raise StrategyError(
        f"in a cluster the strategy must span its tasks, got {name!r}, which has replicas on this"
        f" machine alone: {cluster.source} lists {count} tasks, and each would train a model of its"
        f" own. Use create_strategy() or create_strategy({for_cluster!r}). For separate models pass"
        " alone=True to create_strategy."
    )


def _spans_tasks(strategy: tf.distribute.Strategy) -> bool:
    if isinstance(strategy, tf.distribute.ParameterServerStrategy | tf.distribute.TPUStrategy):
        return True
    here = len(devices_listed(strategy, "worker_devices")) or 1  # the default strategy lists none
    return strategy.num_replicas_in_sync > here
