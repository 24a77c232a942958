"""The program of a task that runs a function of another process; see `functions`.

It is started by its path, and can import what the other process can once it has read the call.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import linecache
import os
import pickle
import signal
import sys
import time
from pathlib import Path

# Suffixes of the files of a task's answer. DONE: the function has ended.
RESULT, DONE, PID = ".result", ".done", ".pid"
STACKS = signal.SIGVTALRM  # makes a task write its stacks; no library uses this signal
_LOOK_EVERY = 0.02  # seconds


def main(call_file: str) -> None:
    """Run the function, and write its result, or its exception for the launcher.

    Args:
        call_file: the call that `functions` has written; the answer stands beside it.
    """
    answer = str(Path(call_file).with_name(_task_name()))
    call = pickle.loads(Path(call_file).read_bytes())
    Path(answer + PID).write_text(str(os.getpid()), encoding="ascii")
    sys.path[:] = call["path"]
    del sys.argv[1:]
    linecache.cache.update(call["sources"])
    from tfdist_ext import failures

    failures.watch()
    # No timer: a process has only one, and a strategy may need it.
    faulthandler.register(STACKS, file=sys.__stderr__ or 2)
    try:
        function, args = pickle.loads(call["call"])
        Path(answer + RESULT).write_bytes(_pickled(function(*args)))
    except Exception as error:
        # As Python ends a program, but without the frame of this module, and with the lines of
        # cells.
        trace = error.__traceback__ and error.__traceback__.tb_next
        print(failures.record(error.with_traceback(trace)).traceback, end="", file=sys.stderr)
        raise SystemExit(1) from None
    finally:
        Path(answer + DONE).touch()
    # TensorFlow's connections between workers break when the first of them exits.
    while any(_is_at_work(Path(call_file).parent / name) for name in call["wait_for"]):
        time.sleep(_LOOK_EVERY)


def _task_name() -> str:
    """The name of this task, as "worker:1"; "process" without a cluster."""
    if "TF_CONFIG" not in os.environ:
        return "process"
    task = json.loads(os.environ["TF_CONFIG"])["task"]
    return f"{task['type']}:{task['index']}"


def _is_at_work(answer: Path) -> bool:
    """Whether the task's process is alive and its function is still running."""
    if Path(f"{answer}{DONE}").exists():
        return False
    import psutil

    with contextlib.suppress(FileNotFoundError, ValueError):  # it has not started yet
        pid = int(Path(f"{answer}{PID}").read_text(encoding="ascii"))
        try:
            # The launcher keeps an ended process as a zombie, until all tasks have ended.
            return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False
    return True


def _pickled(result: object) -> bytes:
    import cloudpickle  # what is defined in the function has no name to be found by

    try:
        return cloudpickle.dumps(result)
    except Exception as error:  # objects raise anything
        from tfdist_ext.errors import LaunchError

        raise LaunchError(
            f"the result of fn, a {type(result).__name__}, cannot be copied to the process that"
            f" called it: {error}. Return numbers or NumPy arrays."
        ) from error


if __name__ == "__main__":
    main(*sys.argv[1:])
