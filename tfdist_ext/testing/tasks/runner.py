"""`run_tasks`: runs a function in each task of a cluster of processes on this machine."""

from __future__ import annotations

import functools
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tfdist_ext.cluster.jobs import JOB_NAMES
from tfdist_ext.errors import LaunchError
from tfdist_ext.launch import LaunchPlan, TaskPlan, addresses_needed, plan_local, reserve_ports
from tfdist_ext.testing.tasks.supervision import Results, Supervision
from tfdist_ext.user_frames import filter_traceback

__all__ = ["check_timeout", "run_tasks", "supervise", "task_counts"]


@filter_traceback
def run_tasks(
    fn: Callable[..., Any],
    cluster: Mapping[str, int] | int | None,
    timeout: float = 60.0,
    *,
    args: tuple[Any, ...] = (),
    env: Mapping[str, str] | None = None,
) -> Results:
    """Run `fn(*args)` once in each task of a cluster of processes on this machine.

    Each task has its TF_CONFIG, and a TensorFlow that is imported and has not started. With
    parameter servers the run succeeds when the coordinator does: other tasks have five more
    seconds, and are killed then.

    Args:
        fn: a function at the top level of a module.
        cluster: numbers of tasks by type, {"worker": 2, "ps": 1}, or the number of workers. With
            `ps` there is also a chief, which is the coordinator. None: one process without
            TF_CONFIG, whose name is "process".
        timeout: seconds for all. After it each task writes its stacks to its output and is killed.
        env: environment of the tasks, to which TF_CONFIG is added; None: that of this process.

    Returns:
        What `fn` returned in each task, by the name of the task.

    Raises:
        LaunchError: no cluster can be of these tasks, or `fn` cannot be sent to them.
        TaskError: a task raised (its traceback is in the message), was killed, or hung.
    """
    return supervise(fn, cluster, timeout, args=args, env=env)


def supervise(
    fn: Callable[..., Any],
    cluster: Mapping[str, int] | int | None,
    timeout: float,
    *,
    args: tuple[Any, ...] = (),
    env: Mapping[str, str] | None = None,
    on_message: Callable[[str, str, Any], None] = lambda task, kind, value: None,
    logical_cpus: int = 1,
) -> Results:
    """`run_tasks` with messages from tasks, which call `on_message(task, kind, value)`."""
    check_timeout(timeout)
    counts = {} if cluster is None else task_counts(cluster)
    needed = addresses_needed(**counts) if counts else 0
    env = dict(os.environ if env is None else env)
    with reserve_ports(needed) as ports, tempfile.TemporaryDirectory() as folder:
        if counts:
            plan = plan_local([sys.executable], **counts, ports=ports, env=env)
        else:
            plan = LaunchPlan((TaskPlan("process", (sys.executable,)),))
        call = functools.partial(_call, logical_cpus, fn)
        return Supervision(plan, call, args, env, Path(folder), timeout, on_message).run()


def _call(logical_cpus: int, fn: Callable[..., Any], *args: Any) -> Any:
    if logical_cpus > 1:
        from tfdist_ext.strategies.devices import make_logical_cpus

        make_logical_cpus(logical_cpus)
    return fn(*args)


def check_timeout(timeout: Any) -> None:
    """Raise LaunchError unless it is a number of seconds."""
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout > 0:
        raise LaunchError(f"timeout must be a number of seconds above 0, got {timeout!r}.")


def task_counts(cluster: Mapping[str, int] | int) -> dict[str, Any]:
    """The arguments of `plan_local` for a cluster.

    Raises:
        LaunchError: no cluster can be of these tasks.
    """
    given = {"worker": cluster} if isinstance(cluster, int) else dict(cluster)
    if unknown := [name for name in given if name not in JOB_NAMES]:
        raise LaunchError(
            f"the tasks of a cluster must be of the types {', '.join(JOB_NAMES)}, got"
            f" {unknown[0]!r}."
        )
    for name, count in given.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise LaunchError(f"{name} must be a number of tasks, got {count!r}.")
    for name in ("chief", "evaluator"):
        if given.get(name, 0) > 1:
            raise LaunchError(f"a cluster must have at most one {name}, got {given[name]}.")
    counts: dict[str, Any] = {
        "workers": given.get("worker", 0),
        "chief": bool(given["chief"]) if "chief" in given else None,
        "ps": given.get("ps", 0),
        "evaluator": bool(given.get("evaluator", 0)),
    }
    # The planner refuses what cannot train, before any port is reserved.
    ports = range(1, addresses_needed(**counts) + 1)
    plan_local([sys.executable], **counts, ports=ports, env={})
    return counts
