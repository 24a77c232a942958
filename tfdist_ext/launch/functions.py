"""`tfd.launch`, and what it shares with `testing.run_tasks`: functions as the tasks of a cluster.

A file holds the function and its arguments. Each task is a process of `function_task`, which reads
this file and writes its answer beside it.
"""

from __future__ import annotations

import contextlib
import io
import linecache
import marshal
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any

from tfdist_ext.user_frames import filter_traceback

# `import tfdist_ext` imports this module: what it needs is imported when a function is launched.
if TYPE_CHECKING:
    import pickle

    from tfdist_ext.launch.plan import LaunchPlan
    from tfdist_ext.launch.run import RunResult

__all__ = ["function_plan", "launch", "raise_stop_signal", "results_in", "said_by"]


@filter_traceback
def launch(
    fn: Callable[..., Any],
    *,
    args: Sequence[Any] = (),
    workers: int = 2,
    chief: bool | None = None,
    ps: int = 0,
    evaluator: bool = False,
    max_restarts: int = 0,
    log_dir: str | os.PathLike[str] | None = None,
) -> dict[str, Any]:
    """Run `fn(*args)` in each task of a cluster on this machine, as `tfdist run` runs a script.

    Each task is a Python process of its own, whatever this one has imported or computed. Their
    output is shown here as it comes, with the name of the task before each line. Ctrl-C, and the
    interrupt of a notebook's kernel, end all tasks: a `fit` with a `checkpoint_dir` saves before.

    Args:
        fn: any function, also one of a notebook cell. What it uses of this process is copied to
            the tasks by cloudpickle: functions, and data as NumPy arrays. Create tensors, models
            and strategies inside the function.
        args: the arguments of `fn`, the same for each task.
        workers, ps: how many tasks of that type.
        chief: whether there is a chief. None: exactly when there are parameter servers.
        evaluator: whether there is an evaluator beside the cluster.
        max_restarts: how often the cluster restarts when a task fails; `fit(checkpoint_dir=...)`
            continues from its newest checkpoint.
        log_dir: where each task gets a log file such as `worker-1.log`; None: no log files.

    Returns:
        What `fn` returned in each task, by the name of the task. Servers, which end when the
        coordinator is done, are not included.

    Raises:
        LaunchError: the tasks are not a cluster, or `fn` cannot be sent to them.
        TaskError: a task failed; names it, and has the traceback of its exception.
        KeyboardInterrupt: after Ctrl-C, when all tasks have ended.
    """
    from tfdist_ext.errors import TaskError
    from tfdist_ext.launch.exit_codes import (
        COMMAND,
        STALL_TIMEOUT,
        USUAL_STALL_TIMEOUT,
        stall_timeout,
    )
    from tfdist_ext.launch.restarts import RestartPolicy, run_with_restarts
    from tfdist_ext.launch.run import Limits
    from tfdist_ext.launch.stop_signals import StopSignals

    tasks = {"workers": workers, "chief": chief, "ps": ps, "evaluator": evaluator}
    numbers = ", ".join(f"{name}={value}" for name, value in tasks.items() if value)
    again = f"tfd.launch({getattr(fn, '__name__', fn)}, {numbers})"
    env = {COMMAND: again, STALL_TIMEOUT: f"{USUAL_STALL_TIMEOUT:g}", **os.environ}
    policy, stop = RestartPolicy(max_restarts, workers, workers), StopSignals()
    with tempfile.TemporaryDirectory(prefix="tfdist-") as made:  # no one else may write there
        folder = Path(made)

        def planned(_: Sequence[int], logs: Path) -> contextlib.AbstractContextManager[LaunchPlan]:
            return function_plan(fn, args, tasks, folder, env, None if log_dir is None else logs)

        logs = folder if log_dir is None else Path(log_dir)
        limits = Limits(stall_timeout=stall_timeout(env))
        ended = run_with_restarts(planned, policy, logs, env, limits, stop)
        raise_stop_signal(stop.first)
        if ended.exit_status:
            raise TaskError(said_by(ended, folder), (str(ended.failed_task),))
        return results_in(folder, ended)


@contextlib.contextmanager
def function_plan(
    fn: Callable[..., Any],
    args: Sequence[Any],
    tasks: Mapping[str, Any] | None,
    folder: Path,
    env: Mapping[str, str],
    log_dir: Path | None,
    *,
    timeout: float | None = None,
) -> Iterator[LaunchPlan]:
    """The plan of tasks that run a function.

    Args:
        tasks: as of `local_plan`; None: one process without TF_CONFIG, named "process".
        folder: for the call, and the answers of the tasks; those of an earlier start are removed.
        timeout: seconds after which each task writes its stacks to its output.

    Raises:
        LaunchError: the tasks are not a cluster, or `fn` cannot be sent to them.
    """
    from tfdist_ext.launch import function_task
    from tfdist_ext.launch.plan import LaunchPlan, TaskPlan, local_plan

    call = folder / "call"
    # By its path, because this process may know a path to the package that others do not.
    command = (sys.executable, "-P", function_task.__file__, str(call))
    with contextlib.ExitStack() as ports:
        if tasks is None:
            log_file = None if log_dir is None else log_dir / "process.log"
            plan = LaunchPlan((TaskPlan("process", command, log_file=log_file),))
        else:
            plan = ports.enter_context(local_plan(command, **tasks, env=env, log_dir=log_dir))
        for answer in folder.glob("*:*.*"):
            answer.unlink()
        wait_for = [] if plan.coordinator else [task.name for task in plan.tasks]
        call.write_bytes(_pickled_call(fn, args, wait_for, timeout))
        yield plan


def _pickled_call(
    fn: Callable[..., Any], args: Sequence[Any], wait_for: Sequence[str], timeout: float | None
) -> bytes:
    """What `function_task` reads.

    Args:
        wait_for: no task exits before the function has ended in these tasks.
        timeout: seconds after which each task writes its stacks; None: never.

    Raises:
        LaunchError: something cannot be sent to another process.
    """
    import pickle

    from tfdist_ext.errors import LaunchError

    if not callable(fn):
        raise LaunchError(
            f"fn must be a function, got {fn!r}; write: tfd.launch(train, args=(...))"
        )
    buffer, pickler = io.BytesIO(), _pickler_class()
    try:
        pickler(buffer).dump((fn, tuple(args)))
    except Exception as error:  # objects raise anything
        raise LaunchError(
            "fn, its arguments and what it uses must be copied to other processes, got:"
            f" {error}; make models, variables and strategies inside of fn"
        ) from error
    # The text of a notebook's cells is in no file. Tracebacks show it, and tf.function reads it.
    cells = {name: entry for name, entry in linecache.cache.items() if _is_cell(entry)}
    return pickle.dumps(
        {
            "path": sys.path,
            "sources": cells,
            "call": buffer.getvalue(),
            "wait_for": list(wait_for),
            "timeout": timeout,
        }
    )


def _pickler_class() -> type[pickle.Pickler]:
    """
    Raises:
        LaunchError: cloudpickle is not installed.
    """
    from tfdist_ext.errors import LaunchError
    from tfdist_ext.messages import optional_module

    use = "Sending a function to another process"
    cloudpickle = optional_module("cloudpickle", "cloudpickle", use, error=LaunchError)

    class Pickler(cloudpickle.CloudPickler):  # type: ignore[name-defined]
        """Keeps the file name of a function, which finds its text; cloudpickle drops it."""

        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, CodeType):  # the tasks are of the same Python
                return marshal.loads, (marshal.dumps(obj),)
            return super().reducer_override(obj)

    return Pickler


def _is_cell(entry: Sequence[Any]) -> bool:
    """Whether an entry of Python's cache of source lines belongs to a notebook cell."""
    return len(entry) == 4 and entry[1] is None


def results_in(folder: Path, ended: RunResult) -> dict[str, Any]:
    """What the tasks have returned, in the order of tasks; without tasks that did not return."""
    import pickle

    from tfdist_ext.launch.function_task import RESULT

    files = {name: folder / (name + RESULT) for name in ended.returncodes}
    return {name: pickle.loads(file.read_bytes()) for name, file in files.items() if file.exists()}


def said_by(ended: RunResult, folder: Path) -> str:
    """The root cause of a failed run, with the traceback of its exception or its last lines."""
    from tfdist_ext.launch.function_task import TRACEBACK

    cause = str(ended.failed_task)
    tracebacks = {file.stem: file for file in folder.glob("*" + TRACEBACK)}
    # A task that was killed, or has left, has no traceback: the task that needed it has one.
    named = cause if cause in tracebacks else next(iter(tracebacks), None)
    said = "\n".join(ended.last_lines[cause])
    if named is not None:
        said = tracebacks[named].read_text(encoding="utf-8")
        said = said if named == cause else f"{named} failed because of it:\n{said}"
    return f"{cause} failed first, exit status {ended.exit_status}:\n{said}".rstrip()


def raise_stop_signal(number: signal.Signals | None) -> None:
    """Send the signal that has ended the tasks to this process, too; None: no signal has.

    Raises:
        KeyboardInterrupt: the handler of the signal has returned.
    """
    if number is not None:
        signal.raise_signal(number)
        raise KeyboardInterrupt
