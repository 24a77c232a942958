"""The plan of a run: the processes of a cluster on this machine."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tfdist_ext.cluster import ClusterConfig, Task
from tfdist_ext.cluster.environments import seen_by
from tfdist_ext.cluster.jobs import Jobs
from tfdist_ext.errors import LaunchError
from tfdist_ext.launcher.resources import reserve_ports
from tfdist_ext.messages import check_int


@dataclass(frozen=True)
class TaskPlan:
    """One process.

    Attributes:
        name: as "worker:1".
        argv: its command.
        env: variables added to the environment of the launcher.
        log_file: gets its output; None: only the terminal shows the output.
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
        coordinator: the run succeeds when this task succeeds; None where every task has to end
            with 0. With parameter servers, the chief is the coordinator, because TensorFlow's
            servers never end by themselves.
        ports: of the tasks, on this machine.
        shows_ids: whether the launcher reports the process ids.
    """

    tasks: tuple[TaskPlan, ...]
    coordinator: str | None = None
    ports: tuple[int, ...] = ()
    shows_ids: bool = False


@contextlib.contextmanager
def local_plan(
    command: Sequence[str],
    *,
    workers: int = 1,
    chief: bool | None = None,
    ps: int = 0,
    evaluator: bool = False,
    gpus: Sequence[str] = (),
    log_dir: str | os.PathLike[str] | None = None,
    env: Mapping[str, str],
) -> Iterator[LaunchPlan]:
    """Plan one process for each task of a cluster on this machine; starts nothing.

    The ports of the plan are reserved until the `with` block ends.

    Args:
        command: the program and its arguments, the same for every task.
        workers, ps: the numbers of tasks.
        chief: whether there is a chief. None: only with parameter servers, which need a chief as
            their coordinator.
        evaluator: whether there is an evaluator.
        gpus: the GPU that each worker sees; empty: each worker sees all GPUs.
        log_dir: where each task gets a log file such as `worker-1.log`; None: no log files.
        env: the environment of the tasks; its PATH is where the program is looked up.

    Raises:
        LaunchError: there is no command, its program is not found, the tasks are not a cluster,
            or too few ports are free.
    """
    counts = task_counts(workers=workers, chief=chief, ps=ps, evaluator=evaluator)
    argv = find_command(command, env)
    with reserve_ports(sum(counts.values())) as ports:
        tasks = []
        for config in _configs(counts, ports):
            job, index = config.task.type, config.task.index
            log_file = None if log_dir is None else Path(log_dir) / f"{job}-{index}.log"
            task_env = {"TF_CONFIG": config.to_tf_config()}
            if gpus and job == "worker":
                task_env["CUDA_VISIBLE_DEVICES"] = gpus[index]
            tasks.append(TaskPlan(str(config.task), argv, task_env, log_file))
        yield LaunchPlan(tuple(tasks), "chief:0" if ps else None, ports)


def _configs(counts: Mapping[str, int], ports: Sequence[int]) -> Iterator[ClusterConfig]:
    """The cluster as each task sees it."""
    free = iter(ports)
    addresses = {
        job: tuple(f"127.0.0.1:{next(free)}" for _ in range(count)) for job, count in counts.items()
    }
    for job, count in counts.items():
        cluster = Jobs(seen_by(job, addresses))
        for index in range(count):
            yield ClusterConfig(cluster, task=Task(job, index))


def task_counts(
    *, workers: int, chief: bool | None = None, ps: int = 0, evaluator: bool = False
) -> dict[str, int]:
    """Job -> its number of tasks; the arguments are those of `local_plan`.

    Raises:
        LaunchError: these tasks make no cluster.
    """
    has_chief = ps > 0 if chief is None else chief
    check_int(workers, "--workers", error=LaunchError)
    check_int(ps, "--ps", error=LaunchError)
    if ps and not workers:
        raise LaunchError(
            f"--ps {ps} needs workers, because parameter servers only hold variables. Add --workers"
            " 1 or more."
        )
    if ps and not has_chief:
        raise LaunchError(
            f"--ps {ps} needs a chief, which is the coordinator of the training. Remove"
            " --no-chief or --ps."
        )
    if not workers and not has_chief:
        raise LaunchError(
            "--workers 0 without a chief leaves no task that trains. Add --workers 1 or more."
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
    if not command or not command[0]:
        raise LaunchError(
            "there is no command to run. Put it after --, for example: "
            "tfdist run --workers 2 -- python train.py"
        )
    program = command[0]
    if shutil.which(program, path=env.get("PATH", os.defpath)):
        return tuple(command)
    if program in ("python", "python3") and sys.executable:
        # A virtual environment that is not activated has no python on PATH: take its own.
        return (sys.executable, *command[1:])
    raise LaunchError(
        f"there is no executable program {program!r}. Check its path, and start a script with its"
        " interpreter: -- python train.py"
    )
