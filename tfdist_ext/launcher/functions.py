"""Functions as the tasks of a cluster, for `tfd.launch` and `testing.run_tasks`.

A file holds the function and its arguments. Each task is a process of `function_task`, which reads
this file and writes its answer beside it.
"""

from __future__ import annotations

import contextlib
import io
import linecache
import marshal
import os
import pickle
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType
from typing import Any

from tfdist_ext.errors import LaunchError, TaskError
from tfdist_ext.launcher import exit_codes, function_task
from tfdist_ext.launcher.plan import LaunchPlan, TaskPlan, local_plan
from tfdist_ext.launcher.restarts import RestartPolicy, run_with_restarts
from tfdist_ext.launcher.run import Limits, RunResult
from tfdist_ext.messages import optional_module
from tfdist_ext.user_frames import filter_traceback


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
    """Runs `fn(*args)` in each task of a cluster on this machine.

    Each task is a new Python process, as with `tfdist run`. The output of the tasks appears here,
    with the name of the task before each line. Ctrl-C, or the interrupt of a notebook kernel, ends
    all tasks. A `fit` with a `checkpoint_dir` saves a checkpoint first.

    Args:
        fn: a function, which may be defined in a notebook cell. cloudpickle copies the functions
            and NumPy arrays that it uses. Create tensors, models and strategies inside the
            function.
        args: the arguments of `fn`, the same for each task.
        workers: the number of workers.
        chief: whether the cluster has a chief. By default, only a cluster with parameter servers
            has a chief.
        ps: the number of parameter servers.
        evaluator: whether to start an evaluator.
        max_restarts: the number of restarts after a task fails. `fit(checkpoint_dir=...)` resumes
            from its newest checkpoint.
        log_dir: a folder for log files such as `worker-1.log`, or None for no log files.

    Returns:
        The result of `fn` in each task, by the name of the task. Servers are not included.

    Raises:
        LaunchError: the numbers of tasks are invalid, or `fn` cannot be copied to the tasks.
        TaskError: a task failed. The message contains its name and traceback.
        KeyboardInterrupt: Ctrl-C ended the tasks.
    """
    tasks = {"workers": workers, "chief": chief, "ps": ps, "evaluator": evaluator}
    env = {
        exit_codes.COMMAND: "the same call of tfd.launch",
        exit_codes.STALL_TIMEOUT: f"{exit_codes.USUAL_STALL_TIMEOUT:g}",
        **os.environ,
    }
    policy, stop = RestartPolicy(max_restarts, workers, workers), exit_codes.StopSignals()
    with tempfile.TemporaryDirectory(prefix="tfdist-") as name:  # no one else may write there
        folder = Path(name)

        def planned(_: Sequence[int], logs: Path) -> contextlib.AbstractContextManager[LaunchPlan]:
            log_folder = None if log_dir is None else logs
            return function_plan(fn, args, tasks, folder, env, log_folder)

        logs = folder if log_dir is None else Path(log_dir)
        ended = run_with_restarts(planned, policy, logs, env, Limits(), stop)
        results = {} if ended.exit_status else results_in(folder, ended)
    raise_stop_signal(stop.first)
    if ended.exit_status:
        raise TaskError(failure_message(ended), (str(ended.failed_task),))
    return results


@contextlib.contextmanager
def function_plan(
    fn: Callable[..., Any],
    args: Sequence[Any],
    tasks: Mapping[str, Any] | None,
    folder: Path,
    env: Mapping[str, str],
    log_dir: Path | None,
) -> Iterator[LaunchPlan]:
    """The plan of tasks that run a function.

    Args:
        tasks: arguments of `local_plan`; None: one process named "process", without TF_CONFIG.
        folder: for the call and the results of the tasks. Earlier results are removed.

    Raises:
        LaunchError: the tasks are not a cluster, or `fn` cannot be sent to them.
    """
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
        call.write_bytes(_pickled_call(fn, args, wait_for))
        yield plan


def _pickled_call(fn: Callable[..., Any], args: Sequence[Any], wait_for: Sequence[str]) -> bytes:
    """What `function_task` reads.

    Args:
        wait_for: no task exits before the function has ended in these tasks.

    Raises:
        LaunchError: something cannot be sent to another process.
    """
    if not callable(fn):
        raise LaunchError(
            f"fn must be a function, got {fn!r}; write: tfd.launch(train, args=(...))"
        )
    buffer, pickler = io.BytesIO(), _pickler_class()
    try:
        pickler(buffer).dump((fn, tuple(args)))
    except Exception as error:  # objects raise anything
        raise LaunchError(
            "fn, its arguments or the objects it uses cannot be copied to other processes:"
            f" {error}. Make models, variables and strategies inside fn."
        ) from error
    # The text of a notebook's cells is in no file. Tracebacks show it, and tf.function reads it.
    entries = linecache.cache.items()
    cells = {name: entry for name, entry in entries if len(entry) == 4 and entry[1] is None}
    return pickle.dumps(
        {
            "path": sys.path,
            "sources": cells,
            "call": buffer.getvalue(),
            "wait_for": list(wait_for),
        }
    )


def _pickler_class() -> type[pickle.Pickler]:
    """Returns the class that writes functions of a notebook or of a script.

    Raises:
        LaunchError: cloudpickle is not installed.
    """
    use = "Sending a function to another process"
    cloudpickle = optional_module("cloudpickle", "cloudpickle", use, error=LaunchError)

    class Pickler(cloudpickle.CloudPickler):  # type: ignore[name-defined]
        """Keeps the file name of a function, which finds its text; cloudpickle drops it."""

        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, CodeType):  # the tasks are of the same Python
                return marshal.loads, (marshal.dumps(obj),)
            return super().reducer_override(obj)

    return Pickler


def results_in(folder: Path, ended: RunResult) -> dict[str, Any]:
    """The results of the tasks that returned one, in the order of tasks."""
    files = {name: folder / (name + function_task.RESULT) for name in ended.returncodes}
    return {name: pickle.loads(file.read_bytes()) for name, file in files.items() if file.exists()}


def failure_message(ended: RunResult) -> str:
    """The root cause of a failed run, with the traceback of its exception or its last lines."""
    cause = str(ended.failed_task)
    text = "\n".join(ended.last_lines[cause])
    # A task that was killed, or has left, has no traceback: the task that needed it has one.
    for name in sorted(ended.failures, key=lambda name: name != cause):
        if traceback := ended.failures[name].traceback:
            text = "" if name == cause else f"{name} failed because of {cause}:\n"
            text += traceback
            break
    return f"{cause} failed first, exit status {ended.exit_status}:\n{text}".rstrip()


def raise_stop_signal(number: signal.Signals | None) -> None:
    """Send the signal that has ended the tasks to this process, too; None: no signal has.

    Raises:
        KeyboardInterrupt: the handler of the signal has returned.
    """
    if number is not None:
        signal.raise_signal(number)
        raise KeyboardInterrupt
