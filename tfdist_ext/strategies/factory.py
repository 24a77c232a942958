"""create_strategy: describe the environment, choose a strategy, construct it."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfdist_ext import flags
from tfdist_ext.cluster import ClusterConfig, describe_environments
from tfdist_ext.cluster.environments.cloud import tpu_settings
from tfdist_ext.cluster.jobs import ClusterDescription
from tfdist_ext.errors import ClusterConfigError, StrategyError
from tfdist_ext.messages import counted
from tfdist_ext.strategies.cluster_tasks import Cluster, describe
from tfdist_ext.strategies.explanation import CHOICE, Choice, choice_of, devices_listed
from tfdist_ext.strategies.one_machine import make_logical_cpus, seen_devices
from tfdist_ext.strategies.registry import lookup
from tfdist_ext.user_frames import filter_traceback

# Strategies that need a cluster. The cluster may have an evaluator.
CLUSTER_STRATEGIES = ("multi_worker_mirrored", "parameter_server")
TPUClusterResolver = tf.distribute.cluster_resolver.TPUClusterResolver
_CALL = "the call"


@filter_traceback
def create_strategy(
    name: str = "auto",
    *,
    cluster: Cluster = None,
    cluster_resolver: Cluster = None,
    devices: int | str | Sequence[str] | None = None,
    placement: Any = None,
    config: str | Path | None = None,
    wait: float | None = None,
    alone: bool | None = None,
    **options: Any,
) -> tf.distribute.Strategy:
    """Creates a `tf.distribute` strategy.

    Args:
        name: a name from `available_strategies()`, or "auto", which chooses a strategy for the
            cluster, the TPU or the GPUs that it finds.
        cluster: a `ClusterConfig` or a TensorFlow `ClusterResolver`. By default, the cluster of
            the environment (TF_CONFIG, Slurm, Kubernetes, SageMaker, Open MPI).
        cluster_resolver: TensorFlow's name of `cluster`.
        devices: names ("GPU:0") or a number of devices, for strategies on one machine.
        placement: the placement of variables, for `placed` and `parameter_server`.
        config: a TOML file with a [strategy] table, which can contain all of these settings.
        wait: seconds to wait for the other tasks of a cluster. The default is 300.
        alone: if True, the tasks of a cluster do not train together. Each task uses the devices
            of its own machine.
        options: options of the strategy. All strategies of one machine take `logical_cpus`.
            `mirrored` takes `cross_device_ops`, `placed` takes `owned_from`, and `central_storage`
            takes `parameter_device`. `multi_worker_mirrored` takes `communication` ("auto", "ring"
            or "nccl") or `communication_options`, `bucket_bytes`, `shard_optimizer` and
            `gradient_dtype`. `tpu` takes `tpu`, `zone` and `project`. A registered strategy takes
            the parameters of its factory.

    Arguments take precedence over flags (`tfd.flags.define_strategy_flags`), flags over the file,
    and the file over the environment. `explain(strategy)` shows where each setting came from.

    Returns:
        An instance of TensorFlow's own class, or of the registered class. In a cluster, the call
        returns when all workers have started, and prints the missing workers to stderr while it
        waits. An `evaluator` task gets a strategy for the devices of its own machine.

    Raises:
        SystemExit: in a `ps` or `worker` task of a cluster with parameter servers, which serves
            until the coordinator ends. The code is 0 after a success, and 138 otherwise.
        StrategyError: the strategy or an option is unknown, or the strategy cannot run here.
        ClusterConfigError: the cluster is invalid.
    """
    if cluster is not None and cluster_resolver is not None:
        raise StrategyError("cluster and cluster_resolver are the same option. Pass only one.")
    cluster = cluster_resolver if cluster is None else cluster
    arguments = dict(devices=devices, placement=placement, wait=wait, alone=alone, **options)
    settings = _all_settings({"name": None if name == "auto" else name, **arguments}, config)
    try:
        environment = _environment_of(settings, cluster)
        choice = choose(settings.name, settings.places.get("name", _CALL), environment)
        return _construct(choice, settings, environment, is_found=cluster is None)
    except StrategyError as error:
        if elsewhere := "; ".join(settings.lines(without=_CALL)):
            error.args = (f"{error} (Settings: {elsewhere}.)",)
        raise


@dataclass
class Settings:
    """Settings from several places; the first place that sets an option wins.

    Attributes:
        values: option -> the value that won.
        places: option -> where this value came from.
    """

    values: dict[str, Any] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)

    def add(self, place: str, options: Mapping[str, Any]) -> None:
        """Add the settings of a place with lower precedence. A value of None sets nothing."""
        for option, value in options.items():
            if value is not None and option not in self.values:
                self.values[option], self.places[option] = value, place

    @property
    def name(self) -> str:
        """The strategy that was asked for, or "auto"."""
        return self.values.get("name", "auto")

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
        has = f", only {', '.join(document)}" if document else ""
        raise StrategyError(f"{path} has no [strategy] table{has}. Add the table.")
    return table


@dataclass(frozen=True)
class Environment:
    """Everything around this process that the choice depends on.

    Attributes:
        cluster: the cluster that was given or found. None: no cluster, or the strategy uses none.
        resolver: what TensorFlow or this package calls this cluster.
        tpu: where a TPU is named; "" without a TPU.
        asked_for: the number of devices that `devices=` asks for; None if it was not given.
        others: one line for each place that could have described a cluster.
    """

    cluster: ClusterDescription | None = None
    resolver: Cluster = None
    tpu: str = ""
    asked_for: int | None = None
    others: tuple[str, ...] = ()

    @property
    def is_evaluator(self) -> bool:
        """Whether this task evaluates beside a cluster, and does not train."""
        return self.cluster is not None and self.cluster.is_evaluator


def _environment_of(settings: Settings, cluster: Cluster) -> Environment:
    """Step 1: describe the environment of a call, and make the logical CPUs that it asks for."""
    values, name = settings.values, settings.name
    _check_values(values, cluster)
    if cluster is None and not values.get("alone"):
        env_cluster = ClusterConfig.from_env(os.environ)
        takes_cluster = name == "auto" or (name != "tpu" and "cluster" in lookup(name).options)
        cluster = env_cluster if takes_cluster else None
    if "logical_cpus" in values:
        make_logical_cpus(values["logical_cpus"])
    return _describe(cluster, values.get("devices"), os.environ)


def _describe(cluster: Cluster, devices: object, env: Mapping[str, str]) -> Environment:
    """What surrounds this process.

    Args:
        cluster: the cluster that was given or found.
        devices: the setting `devices`.
        env: the environment's variables.

    Raises:
        StrategyError: `cluster` is not a cluster.
        ClusterConfigError: `cluster` cannot be right.
    """
    if isinstance(cluster, TPUClusterResolver):
        return Environment(resolver=cluster, tpu="a TPUClusterResolver was given")
    tpu = tpu_settings(env).get("tpu")
    asked_for = None
    if isinstance(devices, Integral):
        asked_for = int(devices)
    elif devices is not None:
        asked_for = len(devices) if isinstance(devices, list | tuple) else 1
    described = describe(cluster)
    others = [
        f"{place}: {text}"
        for place, text in describe_environments(env)
        if described is None or not text.endswith(f"from {described.source}")
    ]
    return Environment(
        described,
        cluster,
        tpu="" if tpu is None else f"the environment names the TPU {tpu!r}",
        asked_for=asked_for,
        others=tuple(others),
    )


def choose(name: str, asked_in: str, environment: Environment) -> Choice:
    """Step 2: choose the named strategy, or the one that the most specific signal asks for.

    The evaluator of a cluster gets a strategy for its own devices if a strategy of the cluster was
    asked for, because the training runs without it.

    Args:
        name: of a strategy, or "auto".
        asked_in: where the name comes from, for messages.
    """
    cluster = environment.cluster
    if name != "auto" and not (environment.is_evaluator and name in CLUSTER_STRATEGIES):
        return Choice(name, f"it was asked for by name in {asked_in}")
    if cluster is not None and cluster.jobs and not cluster.is_evaluator:
        jobs = ", ".join(cluster.jobs)
        if "ps" in cluster.jobs:
            return Choice("parameter_server", f"{cluster.source} has ps tasks ({jobs})")
        because = f"{cluster.source} describes a cluster ({jobs})"
        no_servers = "parameter_server: the cluster has no ps tasks"
        return Choice("multi_worker_mirrored", because, [no_servers])
    if cluster is None:
        why = "no cluster"
    elif cluster.is_evaluator:
        why = f"{cluster.task} works by itself"
    else:
        why = f"{cluster.source} was given, but describes no cluster"
    passed_over = [f"multi_worker_mirrored, parameter_server: {why}"]
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
    seen = seen_devices()  # after all else, because it starts TensorFlow
    gpus, cpus = (sum(name.startswith(kind) for name in seen) for kind in ("GPU:", "CPU:"))
    if gpus > 1:
        return "mirrored", f"{gpus} GPUs on this machine"
    if gpus:
        return "one_device", "one GPU on this machine"
    passed_over.append("mirrored on GPUs: there are none")
    if cpus > 1:
        return "mirrored", f"{cpus} logical CPUs on this machine"
    return "default", "one CPU on this machine"


def _construct(
    choice: Choice, settings: Settings, environment: Environment, *, is_found: bool
) -> tf.distribute.Strategy:
    """Step 3: make the strategy, and store with it why it was chosen.

    Args:
        is_found: whether the cluster is that of the environment, and not of the call.
    """
    cluster, entry = environment.resolver, lookup(choice.name)
    if choice.name == "tpu" and is_found and "tpu" not in settings.values:
        settings.add("the environment", tpu_settings(os.environ))
    dropped = {"name", "alone", "wait"}  # unless the strategy has an option of this name
    if choice.name not in (*CLUSTER_STRATEGIES, "tpu"):
        dropped.add("logical_cpus")
    elif "logical_cpus" in settings.values:
        raise StrategyError(
            f"logical_cpus={settings.values['logical_cpus']} is for strategies of one machine, but"
            f" the strategy is {choice.name!r}: {choice.because}. Leave logical_cpus out, or set it"
            " with a flag, only without a cluster."
        )
    if environment.is_evaluator:
        dropped.update(option for name in CLUSTER_STRATEGIES for option in lookup(name).options)
    dropped -= {*entry.options}
    options = {name: value for name, value in settings.values.items() if name not in dropped}
    gets_cluster = cluster is not None and (
        choice.name in (settings.name, *CLUSTER_STRATEGIES)
        or isinstance(cluster, TPUClusterResolver)
    )
    if gets_cluster:
        options["cluster_resolver" if "cluster_resolver" in entry.options else "cluster"] = cluster
    strategy = entry.make(options)
    lines = list(settings.lines())
    if is_found and isinstance(cluster, ClusterConfig):
        tasks = counted(cluster.num_tasks, "task")
        lines.append(f"cluster = {cluster.task} of {tasks} from {cluster.source}")
    choice = replace(
        choice,
        settings=tuple(lines),
        cluster=environment.cluster if gets_cluster or environment.is_evaluator else None,
        ignores_cluster=bool(settings.values.get("alone")) or not is_found or gets_cluster,
    )
    setattr(strategy, CHOICE, choice)
    check_spans_cluster(strategy)
    return strategy


def automatic_choice(env: Mapping[str, str]) -> list[str]:
    """What "auto" would choose here, and why, one line each; nothing is made or connected."""
    try:
        choice = choose("auto", _CALL, _describe(ClusterConfig.from_env(env), None, env))
    except (ClusterConfigError, StrategyError) as error:
        return [f"an error: {error}"]
    passed_over = [f"passed over: {line}" for line in choice.passed_over]
    return [f"{choice.name}: {choice.because}", *passed_over]


def _check_values(values: Mapping[str, Any], cluster: Cluster) -> None:
    """Raise StrategyError for a wrong value of a setting that every strategy takes."""
    alone, wait, name = values.get("alone"), values.get("wait"), values.get("name")
    if not isinstance(alone, bool | None):
        raise StrategyError(f"alone must be True or False, got {alone!r}.")
    if alone and (cluster is not None or name in CLUSTER_STRATEGIES):
        raise StrategyError(
            "alone=True makes each task train by itself, so it cannot be combined with"
            f" {'a cluster' if cluster is not None else f'the strategy {name!r}'}. Leave one of"
            " them out."
        )
    is_number = isinstance(wait, int | float) and not isinstance(wait, bool)
    if wait is not None and not (is_number and 0 < wait < 1e9):
        raise StrategyError(f"wait must be a number of seconds above 0, got {wait!r}.")


def check_spans_cluster(strategy: tf.distribute.Strategy) -> None:
    """Check that no task of a cluster would train a separate model by mistake.

    Raises:
        ClusterConfigError: the environment describes a cluster that cannot be right.
        StrategyError: the environment describes a cluster in which several tasks train, the
            strategy has no replica on the other tasks, and nobody asked for separate models.
    """
    choice = choice_of(strategy)
    if _spans_tasks(strategy) or (choice is not None and choice.ignores_cluster):
        return
    cluster = ClusterConfig.from_env(os.environ)
    if cluster is None or cluster.task.type == "evaluator":
        return
    count = sum(task.type != "evaluator" for task in cluster.tasks())
    if count < 2:
        return
    name = type(strategy).__name__ if choice is None else choice.name
    for_cluster = "parameter_server" if "ps" in cluster.jobs else "multi_worker_mirrored"
    raise StrategyError(
        f"the strategy {name!r} has replicas on this machine only, but {cluster.source} lists"
        f" {count} tasks, and each would train a separate model. Use create_strategy() or"
        f" create_strategy({for_cluster!r}). For separate models pass alone=True to"
        " create_strategy."
    )


def _spans_tasks(strategy: tf.distribute.Strategy) -> bool:
    if isinstance(strategy, tf.distribute.ParameterServerStrategy | tf.distribute.TPUStrategy):
        return True
    here = len(devices_listed(strategy, "worker_devices")) or 1  # the default strategy lists none
    return strategy.num_replicas_in_sync > here
