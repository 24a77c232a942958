"""`run_tasks`: runs a function in each task of a cluster of processes on this machine."""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfdist_ext.cluster.jobs import JOB_NAMES
from tfdist_ext.errors import LaunchError, TaskError
from tfdist_ext.launcher.exit_codes import StopSignals
from tfdist_ext.launcher.function_task import DONE, STACKS
from tfdist_ext.launcher.functions import (
    failure_message,
    function_plan,
    raise_stop_signal,
    results_in,
)
from tfdist_ext.launcher.plan import task_counts
from tfdist_ext.launcher.run import Limits, Replaces, RunResult, run_plan
from tfdist_ext.messages import check_int
from tfdist_ext.testing import warm
from tfdist_ext.user_frames import filter_traceback

_MAX_OUTPUT = 8000  # characters of each task


@filter_traceback
def run_tasks(
    fn: Callable[..., Any],
    cluster: Mapping[str, int] | int | None,
    timeout: float = 60.0,
    *,
    args: tuple[Any, ...] = (),
    env: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Runs `fn(*args)` once in each task of a cluster of processes on this machine.

    Works like `tfd.launch`, with a time limit, and in processes that have already imported
    TensorFlow. With parameter servers, the run succeeds if the coordinator succeeds. The other
    tasks then have five seconds to end.

    Args:
        fn: a function. cloudpickle copies the functions and NumPy arrays that it uses.
        cluster: the number of tasks of each type, such as {"worker": 2, "ps": 1}, or the number of
            workers. A cluster with `ps` also gets a chief, which is the coordinator. None runs one
            process named "process", without TF_CONFIG.
        timeout: the time limit in seconds. After it, each task prints its stack traces and is
            killed.
        args: the arguments of `fn`, the same for each task.
        env: the environment variables of the tasks, to which TF_CONFIG is added. By default, the
            variables of this process.

    Returns:
        The result of `fn` in each task, by the name of the task. Tasks that did
        not return are not included.

    Raises:
        LaunchError: the cluster is invalid, or `fn` cannot be copied to the tasks.
        TaskError: a task raised an exception, was killed, or did not end in time. The message
            contains its traceback.
    """
    with tempfile.TemporaryDirectory(prefix="tfdist-") as folder:
        ended = run_function(fn, args, cluster, timeout, folder=Path(folder), env=env)
    if ended.failed:
        lines, cause = [ended.message], ended.message.partition("\n")[2]
        for name, text in ended.outputs.items():
            # Each task that failed in the same way has written the same traceback.
            if shown := (text.replace(cause, "(the traceback above)") if cause else text).strip():
                cut = "" if len(shown) <= _MAX_OUTPUT else f", the last {_MAX_OUTPUT} characters"
                lines.append(f"---- output of {name}{cut}\n{shown[-_MAX_OUTPUT:]}")
        raise TaskError("\n".join(lines), ended.failed)
    return ended.results


@dataclass(frozen=True)
class Ended:
    """How the tasks of a function have ended.

    Attributes:
        failed: names of tasks: the root cause, or those that hung.
        message: why the first of them failed.
        results: what the function returned, by name of task.
        outputs: what each task wrote.
    """

    failed: tuple[str, ...]
    message: str
    results: dict[str, Any]
    outputs: dict[str, str]


def run_function(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    cluster: Mapping[str, int] | int | None,
    timeout: float,
    *,
    folder: Path,
    env: Mapping[str, str] | None = None,
    replaces: Replaces | None = None,
) -> Ended:
    """Run a function as `run_tasks` does; return a failure instead of raising it.

    Args:
        folder: for the call, the answers of tasks and their logs.
        replaces: decides whether a task that fails is replaced, as in `run_plan`.

    Raises:
        LaunchError: the tasks are not a cluster, or `fn` cannot be sent to them.
    """
    check_timeout(timeout)
    tasks = None if cluster is None else options_of_tasks(cluster)
    env = dict(os.environ if env is None else env)
    stop, nowhere = StopSignals(), io.StringIO()
    with function_plan(fn, args, tasks, folder, env, folder) as plan:
        ended = run_plan(
            plan,
            Limits(grace=1.0, timeout=timeout, at_timeout=STACKS),
            env=env,
            stream=nowhere,
            report=nowhere,
            stop=stop,
            replaces=replaces,
            start=warm.start,
        )
    raise_stop_signal(stop.first)
    logs = {name: folder / f"{name.replace(':', '-')}.log" for name in ended.returncodes}
    outputs = {name: log.read_text(errors="replace") for name, log in logs.items()}
    return Ended(*_failure(ended, folder, timeout), results_in(folder, ended), outputs)


def _failure(ended: RunResult, folder: Path, timeout: float) -> tuple[tuple[str, ...], str]:
    if ended.ended_by == "timeout":
        codes = ended.returncodes
        hung = tuple(name for name in codes if not (folder / (name + DONE)).exists())
        state = "had not ended"
        if not hung:  # the function has returned everywhere
            hung = tuple(name for name, code in codes.items() if code != 0)
            state = "had returned but had not exited"
        if hung:
            after = f"after {timeout:g} s; their stacks are in their output."
            return hung, f"{', '.join(hung)} {state} {after}"
    if ended.failed_task is None:
        return (), ""
    return (ended.failed_task,), failure_message(ended)


def check_timeout(timeout: Any) -> None:
    """Raise LaunchError unless it is a number of seconds."""
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout > 0:
        raise LaunchError(f"timeout must be a number of seconds above 0, got {timeout!r}.")


def options_of_tasks(cluster: Mapping[str, int] | int) -> dict[str, Any]:
    """The arguments of `local_plan` for a cluster.

    Raises:
        LaunchError: the tasks are not a cluster.
    """
    counts = {"worker": cluster} if isinstance(cluster, int) else dict(cluster)
    for name, count in counts.items():
        if name not in JOB_NAMES:
            raise LaunchError(
                f"the tasks of a cluster must be of the types {', '.join(JOB_NAMES)}, got {name!r}."
            )
        most = 1 if name in ("chief", "evaluator") else None
        check_int(count, name, high=most, error=LaunchError)
    tasks: dict[str, Any] = {
        "workers": counts.get("worker", 0),
        "chief": bool(counts["chief"]) if "chief" in counts else None,
        "ps": counts.get("ps", 0),
        "evaluator": bool(counts.get("evaluator", 0)),
    }
    task_counts(**tasks)  # raises for a cluster that cannot train
    return tasks
