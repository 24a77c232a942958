"""`tfd.launch`: a function of a notebook, a REPL or a script as the tasks of a cluster."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import json
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
from tfdist_ext.launch import function_task
from tfdist_ext.launch.command_line import COMMAND
from tfdist_ext.launch.exit_codes import STALL_TIMEOUT, USUAL_STALL_TIMEOUT, stall_timeout
from tfdist_ext.launch.plan import LaunchPlan, addresses_needed, plan_local, task_counts
from tfdist_ext.launch.ports import reserve_ports
from tfdist_ext.launch.restarting import RESULT, Limits, run_with_restarts
from tfdist_ext.launch.restarts import RestartPolicy
from tfdist_ext.launch.stop_signals import StopSignals
from tfdist_ext.launch.tracebacks import without_own_frames
from tfdist_ext.messages import optional_module
from tfdist_ext.user_frames import filter_traceback

__all__ = ["launch"]


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
            the tasks by cloudpickle: functions, and data as NumPy arrays. Tensors, models and
            strategies are to be made in it.
        args: its arguments, the same for each task.
        workers, ps: how many tasks of that type.
        chief: whether there is a chief. None: exactly when there are parameter servers.
        evaluator: whether there is an evaluator beside the cluster.
        max_restarts: how often the cluster starts again when a task fails;
            `fit(checkpoint_dir=...)` goes on from its newest checkpoint.
        log_dir: where each task gets a log file such as `worker-1.log`; None: no log files.

    Returns:
        What `fn` returned in each task, by the name of the task. Servers, which end when the
        coordinator is done, are not in it.

    Raises:
        LaunchError: no cluster can be of these tasks, or `fn` cannot be sent to them.
        TaskError: a task failed; names it, and has the traceback of its exception.
        KeyboardInterrupt: after Ctrl-C, when all tasks have ended.
    """
    tasks = {"workers": workers, "chief": chief, "ps": ps, "evaluator": evaluator}
    counts = task_counts(workers=workers, chief=chief, ps=ps, evaluator=evaluator)
    names = [f"{job}:{index}" for job, count in counts.items() for index in range(count)]
    policy = RestartPolicy(max_restarts, workers, workers)
    env = dict(os.environ)
    env.setdefault(COMMAND, _call(fn, tasks))
    env.setdefault(STALL_TIMEOUT, f"{USUAL_STALL_TIMEOUT:g}")
    stop = StopSignals()
    with tempfile.TemporaryDirectory(prefix="tfdist-") as made:  # no one else may write there
        folder = Path(made)
        (folder / "call").write_bytes(_pickled(fn, args))
        result_dir = folder if log_dir is None else Path(log_dir)
        status = run_with_restarts(
            functools.partial(_planned, tasks, folder, env, log_dir is not None),
            policy,
            log_dir=result_dir,
            env=env,
            limits=Limits(stall_timeout=stall_timeout(env)),
            stop=stop,
        )
        if status and stop.first is None:
            ended = json.loads((result_dir / RESULT).read_text(encoding="utf-8"))
            raise _task_error(ended, folder)
        results = {} if status else _results(folder, names)
    if stop.first is not None:
        signal.raise_signal(stop.first)  # for who handles it when nothing is launched
        raise KeyboardInterrupt
    return results


def _call(fn: Callable[..., Any], tasks: Mapping[str, Any]) -> str:
    """What a person types to start it again."""
    given = ", ".join(f"{name}={value}" for name, value in tasks.items() if value)
    return f"tfd.launch({getattr(fn, '__name__', fn)}, {given})"


def _pickled(fn: Callable[..., Any], args: Sequence[Any]) -> bytes:
    """What `function_task` reads.

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
    except Exception as error:  # of whatever object
        raise LaunchError(
            "fn, its arguments and what it uses must be copied to other processes, got:"
            f" {error}; make models, variables and strategies inside of fn"
        ) from error
    # The text of a notebook's cells is in no file. Tracebacks show it, and tf.function reads it.
    cells = {name: entry for name, entry in linecache.cache.items() if _is_cell(entry)}
    return pickle.dumps({"path": sys.path, "sources": cells, "call": buffer.getvalue()})


def _pickler_class() -> type[pickle.Pickler]:
    """
    Raises:
        LaunchError: cloudpickle is not installed.
    """
    use = "Sending a function to another process"
    cloudpickle = optional_module("cloudpickle", "cloudpickle", use, error=LaunchError)

    class Pickler(cloudpickle.CloudPickler):  # type: ignore[name-defined]
        """Keeps the file of a function, by which its text is found; cloudpickle drops it."""

        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, CodeType):  # it goes to the same Python
                return marshal.loads, (marshal.dumps(obj),)
            return super().reducer_override(obj)

    return Pickler


def _is_cell(entry: Sequence[Any]) -> bool:
    """Whether an entry of Python's cache of source lines, which has no time, is of no file."""
    return len(entry) == 4 and entry[1] is None


@contextlib.contextmanager
def _planned(
    tasks: Mapping[str, Any],
    folder: Path,
    env: Mapping[str, str],
    logs: bool,
    workers: Sequence[int],
    log_dir: Path,
) -> Iterator[LaunchPlan]:
    for answer in folder.glob("*:*"):  # of the start before this one
        answer.unlink()
    # By its path, because this process may know a path to the package that others do not.
    command = [sys.executable, "-P", function_task.__file__, str(folder / "call")]
    with reserve_ports(addresses_needed(**tasks)) as ports:
        plan = plan_local(command, **tasks, ports=ports, env=env, log_dir=log_dir if logs else None)
        yield dataclasses.replace(
            plan,
            tasks=tuple(
                dataclasses.replace(task, argv=(*task.argv, str(folder / task.name)))
                for task in plan.tasks
            ),
        )


def _results(folder: Path, names: Sequence[str]) -> dict[str, Any]:
    """What the tasks have returned, of those that have."""
    files = {name: folder / (name + function_task.RESULT) for name in names}
    return {name: pickle.loads(file.read_bytes()) for name, file in files.items() if file.exists()}


def _task_error(ended: Mapping[str, Any], folder: Path) -> TaskError:
    """The error for a run that has failed.

    Args:
        ended: how, as `run_with_restarts` has written it.
        folder: where the tasks have left their tracebacks.
    """
    cause = ended["failed_task"]
    tracebacks = {file.stem: file for file in folder.glob("*" + function_task.TRACEBACK)}
    # A task that was killed, or has left, has none: then that of the one which needed it.
    named = cause if cause in tracebacks else next(iter(tracebacks), None)
    said = "\n".join(ended["last_lines"])
    if named is not None:
        lines = tracebacks[named].read_text(encoding="utf-8").splitlines()
        said = "\n".join(without_own_frames(lines))
        said = said if named == cause else f"{named} failed because of it:\n{said}"
    error = TaskError(f"{cause} failed first, exit status {ended['status']}:\n{said}".rstrip())
    error.failed = (cause,)
    return error
