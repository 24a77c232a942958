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

__all__ = [
    "LaunchPlan",
    "TaskPlan",
    "addresses_needed",
    "find_command",
    "plan_local",
    "shell_line",
    "task_counts",
]


@dataclass(frozen=True)
class TaskPlan:
    """One process.

    Attributes:
        name: as "worker:1".
        argv: its command.
        env: what is added to the environment that it gets.
        log_file: where its output goes; None: nowhere but the terminal.
    """

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    log_file: Path | None = None


@dataclass(frozen=True)
class LaunchPlan:
    """The processes of one run.

    Attributes:
        tasks: the processes.
        coordinator: name of the task whose success is the success of the run; None where every
            task has to end with 0. With parameter servers it is the chief: the servers and the
            workers serve it, and TensorFlow's own never end by themselves.
        replaceable: names of tasks whose work the others do when they fail, and which may join
            again: workers beside parameter servers.
    """

    tasks: tuple[TaskPlan, ...]
    coordinator: str | None = None
    replaceable: frozenset[str] = frozenset()


def addresses_needed(
    *, workers: int, chief: bool | None = None, ps: int = 0, evaluator: bool = False
) -> int:
    """How many ports `plan_local` wants: one for each task.

    Raises:
        LaunchError: these tasks make no cluster.
    """
    counts = task_counts(workers=workers, chief=chief, ps=ps, evaluator=evaluator)
    return sum(counts.values())


def plan_local(
    command: Sequence[str],
    *,
    workers: int = 1,
    chief: bool | None = None,
    ps: int = 0,
    evaluator: bool = False,
    gpus: Sequence[str] = (),
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
        gpus: the GPU that each worker sees; empty: each sees all.
        ports: at least `addresses_needed(...)` free ports; see `reserve_ports`.
        log_dir: where each task gets a log file such as `worker-1.log`; None: no log files.
        env: the environment the tasks will have; its PATH is where the program is looked for.

    Raises:
        LaunchError: no command, a command that is not found, tasks that make no cluster, or too
            few ports.
    """
    counts = task_counts(workers=workers, chief=chief, ps=ps, evaluator=evaluator)
    argv = find_command(command, env)
    needed = sum(counts.values())
    if len(ports) < needed:
        raise LaunchError(
            f"{needed} ports are needed, one for each task, got {len(ports)}: {list(ports)}"
        )
    free = iter(ports)
    everyone = {
        job: tuple(f"127.0.0.1:{next(free)}" for _ in range(count)) for job, count in counts.items()
    }
    # The evaluator is in its own cluster alone: TensorFlow's MultiWorkerMirroredStrategy
    # silently trains on a single worker when the cluster names one.
    cluster = {job: addresses for job, addresses in everyone.items() if job != "evaluator"}
    tasks = []
    for job, addresses in everyone.items():
        for index in range(len(addresses)):
            seen = everyone if job == "evaluator" else cluster
            config = ClusterConfig(seen, task=Task(job, index)).to_tf_config()
            log_file = None if log_dir is None else Path(log_dir) / f"{job}-{index}.log"
            task_env = {"TF_CONFIG": config}
            if gpus and job == "worker":
                task_env["CUDA_VISIBLE_DEVICES"] = gpus[index]
            tasks.append(TaskPlan(f"{job}:{index}", argv, task_env, log_file))
    has_servers = "ps" in cluster
    return LaunchPlan(
        tasks=tuple(tasks),
        coordinator="chief:0" if has_servers else None,
        replaceable=frozenset(f"worker:{i}" for i in range(workers) if has_servers),
    )


def task_counts(
    *, workers: int, chief: bool | None = None, ps: int = 0, evaluator: bool = False
) -> dict[str, int]:
    """Job -> how many tasks it has; the arguments are those of `plan_local`.

    Raises:
        LaunchError: these tasks make no cluster.
    """
    has_chief = ps > 0 if chief is None else chief
    for option, count in {"--workers": workers, "--ps": ps}.items():
        if count < 0:
            raise LaunchError(f"{option} must be a number of tasks of at least 0, got {count}")
    if ps and not workers:
        raise LaunchError(
            f"--ps must come with workers, got --ps {ps} alone: parameter servers hold variables"
            " and compute nothing; add --workers 1 or more"
        )
    if ps and not has_chief:
        raise LaunchError(
            f"--ps must come with a chief, got --ps {ps} without one: training with parameter"
            " servers is driven by a coordinator, which is the chief task; leave out --no-chief, or"
            " leave out --ps"
        )
    if not workers and not has_chief:
        raise LaunchError(
            "at least one task must train, got --workers 0 and no chief; add --workers 1 or more"
        )
    counts = {"chief": int(has_chief), "worker": workers, "ps": ps, "evaluator": int(evaluator)}
    return {job: count for job, count in counts.items() if count}


def shell_line(task: TaskPlan) -> str:
    """The task as one line that can be pasted into a shell."""
    settings = [f"{name}={shlex.quote(value)}" for name, value in task.env.items()]
    return " ".join([*settings, shlex.join(task.argv)])


def find_command(command: Sequence[str], env: Mapping[str, str]) -> tuple[str, ...]:
    """The command, with the interpreter in place of a "python" that is not on PATH.

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
