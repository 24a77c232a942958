"""The plan of a run: a pure function from a request to a plan of processes."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tfdist_ext.cluster import ClusterConfig, Task
from tfdist_ext.errors import LaunchError
from tfdist_ext.launch.shares import Share

__all__ = [
    "DATA_SERVICE",
    "SERVICE_MODULE",
    "LaunchPlan",
    "Machine",
    "TaskPlan",
    "addresses_needed",
    "found_command",
    "plan_local",
    "plan_tasks",
    "service_command",
    "shell_line",
    "tasks_of",
]

SERVICE_MODULE = "tfdist_ext.data.service_process"
DATA_SERVICE = "TFDIST_DATA_SERVICE"  # in the environment of tasks: "grpc://host:port"


@dataclass(frozen=True)
class TaskPlan:
    """One process.

    Attributes:
        name: as "worker:1".
        argv: its command.
        env: what is added to the environment that it gets.
        log_file: where its output goes; None: nowhere but the terminal.
        cores: numbers of the cores that it runs on; empty: all.
        node: the machine that it runs on, by its number.
    """

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    log_file: Path | None = None
    cores: tuple[int, ...] = ()
    node: int = 0


@dataclass(frozen=True)
class Machine:
    """A machine that tasks run on.

    Attributes:
        host: its name or address, by which the others reach it.
        ports: free ones, at least one for each task on it; see `reserve_ports`.
    """

    host: str
    ports: Sequence[int]


@dataclass(frozen=True)
class LaunchPlan:
    """The processes of one run.

    Attributes:
        tasks: the processes.
        coordinator: name of the task whose success is the success of the run; None where every
            task has to end with 0. With parameter servers it is the chief: the servers and the
            workers serve it, and TensorFlow's own never end by themselves.
        services: names of tasks that work for all others and never end by themselves: the run is
            over when the others have ended, and a service that ends before has failed.
        replaceable: names of tasks whose work the others do when they fail, and which may join
            again: workers beside parameter servers.
    """

    tasks: tuple[TaskPlan, ...]
    coordinator: str | None = None
    services: frozenset[str] = frozenset()
    replaceable: frozenset[str] = frozenset()


def addresses_needed(
    *,
    workers: int,
    chief: bool | None = None,
    ps: int = 0,
    evaluator: bool = False,
    data_workers: int = 0,
) -> int:
    """How many ports `plan_local` wants: one a task, the dispatcher of data workers included."""
    tasks = max(workers, 0) + max(ps, 0) + int(_with_chief(chief, ps)) + int(evaluator)
    return tasks + (data_workers + 1 if data_workers > 0 else 0)


def plan_local(
    command: Sequence[str],
    *,
    workers: int = 1,
    chief: bool | None = None,
    ps: int = 0,
    evaluator: bool = False,
    data_workers: int = 0,
    shares: Sequence[Share] = (),
    ports: Sequence[int],
    log_dir: str | os.PathLike[str] | None = None,
    env: Mapping[str, str],
) -> LaunchPlan:
    """Plan one process for each task of a cluster on this machine; starts nothing.

    Args:
        command: the program and its arguments, the same for every task.
        workers, ps: how many tasks of that type.
        chief: whether there is a chief. None: exactly when there are parameter servers, which
            need one as their coordinator.
        evaluator: whether there is an evaluator beside the cluster.
        data_workers: how many workers of a tf.data service, whose dispatcher comes with them. The
            tasks of the cluster find its address in TFDIST_DATA_SERVICE.
        shares: what each worker gets of the machine; empty: they share it.
        ports: at least `addresses_needed(...)` free ports; see `reserve_ports`.
        log_dir: where each task gets a log file such as `worker-1.log`; None: no log files.
        env: the environment the tasks will have; its PATH is where the program is looked for.

    Raises:
        LaunchError: no command, a command that is not found, tasks that make no cluster, or too
            few ports.
    """
    jobs = tasks_of(
        workers=workers, chief=chief, ps=ps, evaluator=evaluator, data_workers=data_workers
    )
    argv = found_command(command, env)
    needed = sum(jobs.values())
    if len(ports) < needed:
        raise LaunchError(
            f"ports must be {needed}, one for each task, got {len(ports)}: {list(ports)}; reserve"
            f" {needed}"
        )
    nodes = {job: [0] * count for job, count in jobs.items()}
    machines = {0: Machine("127.0.0.1", ports)}
    return plan_tasks(argv, nodes, machines, shares=shares, log_dir=log_dir, env=env)


def tasks_of(
    *, workers: int, chief: bool | None, ps: int, evaluator: bool, data_workers: int
) -> dict[str, int]:
    """Job -> how many tasks it has; the arguments are those of `plan_local`.

    Raises:
        LaunchError: tasks that make no cluster.
    """
    has_chief = _with_chief(chief, ps)
    _check_tasks(workers, has_chief, ps, data_workers)
    counts = {"chief": int(has_chief), "worker": workers, "ps": ps, "evaluator": int(evaluator)}
    counts |= {"data_dispatcher": int(data_workers > 0), "data_worker": data_workers}
    return {job: count for job, count in counts.items() if count}


def plan_tasks(
    argv: Sequence[str],
    nodes: Mapping[str, Sequence[int]],
    machines: Mapping[int, Machine],
    *,
    shares: Sequence[Share] = (),
    log_dir: str | os.PathLike[str] | None = None,
    env: Mapping[str, str],
) -> LaunchPlan:
    """Plan one process for each task of a cluster on one machine or several; starts nothing.

    Args:
        argv: the program and its arguments, the same for every task.
        nodes: job -> the number of the machine of each of its tasks.
        machines: number -> a machine, with at least a port for each of its tasks.
        shares, log_dir, env: as in `plan_local`.
    """
    free = {
        number: iter([f"{_bracketed(each.host)}:{port}" for port in each.ports])
        for number, each in machines.items()
    }
    everyone = {job: tuple(next(free[node]) for node in where) for job, where in nodes.items()}
    services = [job for job in everyone if job in _SERVICES]
    # The evaluator is in its own cluster alone: TensorFlow's MultiWorkerMirroredStrategy
    # silently trains on a single worker when the cluster names one.
    trains = {job: addresses for job, addresses in everyone.items() if job not in services}
    cluster = {job: addresses for job, addresses in trains.items() if job != "evaluator"}
    dispatcher = everyone["data_dispatcher"][0] if services else ""
    found_at = {DATA_SERVICE: f"grpc://{dispatcher}"} if services else {}
    # The data service computes on the CPU alone: GPUs are the training's.
    quiet = {
        "CUDA_VISIBLE_DEVICES": "-1",
        "TF_CPP_MIN_LOG_LEVEL": env.get("TF_CPP_MIN_LOG_LEVEL", "2"),
    }
    tasks = []
    for job, addresses in everyone.items():
        for index, address in enumerate(addresses):
            share = shares[index] if shares and job == "worker" else Share()
            command, added = tuple(argv), {**found_at, **share.env}
            if job in services:
                command, added = service_command(job, address, dispatcher), quiet
            else:
                seen = trains if job == "evaluator" else cluster
                added["TF_CONFIG"] = ClusterConfig(seen, task=Task(job, index)).to_tf_config()
            log_file = None if log_dir is None else Path(log_dir) / f"{job}-{index}.log"
            name, node = f"{job}:{index}", nodes[job][index]
            tasks.append(TaskPlan(name, command, added, log_file, share.cores, node))
    with_servers = "ps" in cluster
    return LaunchPlan(
        tasks=tuple(tasks),
        coordinator="chief:0" if with_servers else None,
        services=frozenset(task.name for task in tasks if task.name.split(":")[0] in services),
        replaceable=frozenset(
            f"worker:{index}" for index in range(len(cluster.get("worker", ()))) if with_servers
        ),
    )


def service_command(job: str, address: str, dispatcher: str) -> tuple[str, ...]:
    """The command of a process of the tf.data service at this address."""
    words = ("dispatcher",) if job == "data_dispatcher" else ("worker", "--dispatcher", dispatcher)
    process = (sys.executable or "python", "-m", SERVICE_MODULE)
    return (*process, *words, "--address", address)


_SERVICES = ("data_dispatcher", "data_worker")


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def shell_line(task: TaskPlan) -> str:
    """The task as one line that can be pasted into a shell."""
    settings = [f"{name}={shlex.quote(value)}" for name, value in task.env.items()]
    bound = ["taskset", "--cpu-list", ",".join(map(str, task.cores))] if task.cores else []
    return " ".join([*settings, shlex.join([*bound, *task.argv])])


def _with_chief(chief: bool | None, ps: int) -> bool:
    return ps > 0 if chief is None else chief


def _check_tasks(workers: int, chief: bool, ps: int, data_workers: int) -> None:
    counts = {"--workers": workers, "--ps": ps, "--data-workers": data_workers}
    for option, count in counts.items():
        if count < 0:
            raise LaunchError(f"{option} must be a number of tasks of at least 0, got {count}")
    if ps and not workers:
        raise LaunchError(
            f"--ps must come with workers, got --ps {ps} alone: parameter servers hold variables"
            " and compute nothing; add --workers 1 or more"
        )
    if ps and not chief:
        raise LaunchError(
            f"--ps must come with a chief, got --ps {ps} without one: training with parameter"
            " servers is driven by a coordinator, which is the chief task; leave out --no-chief, or"
            " leave out --ps"
        )
    if not workers and not chief:
        raise LaunchError(
            "at least one task must train, got --workers 0 and no chief; add --workers 1 or more"
        )


def found_command(command: Sequence[str], env: Mapping[str, str]) -> tuple[str, ...]:
    """A command whose program is there.

    Raises:
        LaunchError: no command, or a program that is not found.
    """
    if isinstance(command, str):
        raise LaunchError(
            f"the command must be a list of words, got one string: {command!r}; split it, for"
            " example with shlex.split"
        )
    if not command or not command[0]:
        raise LaunchError(
            "there is no command to run; put it after --, for example: "
            "tfdist run --workers 2 -- python train.py"
        )
    program = command[0]
    if shutil.which(program, path=env.get("PATH", os.defpath)):
        return tuple(command)
    if program in ("python", "python3") and sys.executable:
        # A virtual environment that is not activated has no python on PATH: take its own.
        return (sys.executable, *command[1:])
    if program.endswith(".py"):
        advice = f"a script is run by its interpreter: -- python {shlex.join(command)}"
    elif os.sep in program:
        advice = "check that the file is there and may be executed (chmod +x)"
    else:
        advice = "check the spelling, install it, or give its path"
    raise LaunchError(f"there is no program {program!r} to run; {advice}")
