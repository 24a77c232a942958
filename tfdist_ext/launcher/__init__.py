"""Start a cluster on this machine, watch it, and end it: what `tfdist run` does.

    with local_plan(["python", "train.py"], workers=2, env=os.environ) as plan:
        result = run_plan(plan, Limits())

A plan has one command, one TF_CONFIG and one log file for each task; `run` runs it, and `restarts`
runs it again after failures. Nothing here imports TensorFlow.

`tfd.launch` does the same for a function. Import other names from their modules, for example
`from tfdist_ext.launcher.run import run_plan`.
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
        The result of `fn` in each task, by the name of the task. Servers are
        not included.

    Raises:
        LaunchError: the numbers of tasks are invalid, or `fn` cannot be copied to the tasks.
        TaskError: a task failed. The message contains its name and traceback.
        KeyboardInterrupt: Ctrl-C ended the tasks.
    """
    from tfdist_ext.errors import TaskError
    from tfdist_ext.launcher import exit_codes, functions
    from tfdist_ext.launcher.plan import LaunchPlan
    from tfdist_ext.launcher.restarts import RestartPolicy, run_with_restarts
    from tfdist_ext.launcher.run import Limits

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
        ended = run_with_restarts(planned, policy, logs, env, Limits(), stop)
        functions.raise_stop_signal(stop.first)
        if ended.exit_status:
            message = functions.failure_message(ended, folder)
            raise TaskError(message, (str(ended.failed_task),))
        return functions.results_in(folder, ended)
