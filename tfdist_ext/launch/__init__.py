"""Start a cluster on this machine, watch it, and end it: what `tfdist run` does.

    with local_plan(["python", "train.py"], workers=2, env=os.environ) as plan:
        result = run_plan(plan, Limits())

A plan has one command, one TF_CONFIG and one log file for each task; `run` runs it, and `restarts`
runs it again after failures. Nothing here imports TensorFlow.

`tfd.launch` does the same for a function. Import other names from their modules, for example
`from tfdist_ext.launch.run import run_plan`.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tfdist_ext.user_frames import filter_traceback

__all__ = ["launch"]


# `import tfdist_ext` imports this module: `launch` imports what it needs when it is called.
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
    from tfdist_ext.launch import exit_codes, functions
    from tfdist_ext.launch.plan import LaunchPlan
    from tfdist_ext.launch.restarts import RestartPolicy, run_with_restarts
    from tfdist_ext.launch.run import Limits

    tasks = {"workers": workers, "chief": chief, "ps": ps, "evaluator": evaluator}
    env = {
        exit_codes.COMMAND: "the same call of tfd.launch",
        exit_codes.STALL_TIMEOUT: f"{exit_codes.USUAL_STALL_TIMEOUT:g}",
        **os.environ,
    }
    policy, stop = RestartPolicy(max_restarts, workers, workers), exit_codes.StopSignals()
    with tempfile.TemporaryDirectory(prefix="tfdist-") as made:  # no one else may write there
        folder = Path(made)

        def planned(_: Sequence[int], logs: Path) -> contextlib.AbstractContextManager[LaunchPlan]:
            log_folder = None if log_dir is None else logs
            return functions.function_plan(fn, args, tasks, folder, env, log_folder)

        logs = folder if log_dir is None else Path(log_dir)
        limits = Limits(stall_timeout=exit_codes.stall_timeout(env))
        ended = run_with_restarts(planned, policy, logs, env, limits, stop)
        functions.raise_stop_signal(stop.first)
        if ended.exit_status:
            message = functions.failure_message(ended, folder)
            raise TaskError(message, (str(ended.failed_task),))
        return functions.results_in(folder, ended)
