"""Warm processes: forked from a process that has imported TensorFlow and done nothing else.

Importing TensorFlow and Keras takes seconds; forking takes milliseconds. Python's forkserver holds
the imported modules. In each forked process TensorFlow is imported and has not started, so that no
device, no server and no cluster of an earlier test is left.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import connection, forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess

from tfdist_ext import failures
from tfdist_ext.launcher import function_task
from tfdist_ext.launcher.processes import Started

_PRELOADED = ("tensorflow", "keras", "tfdist_ext.training", "tfdist_ext.testing.isolated_run")
# Environment variables that libraries read when they are imported.
_READ_AT_IMPORT = ("TF_", "XLA_", "KERAS_", "OMP_", "OPENBLAS_", "MKL_", "CUDA_", "PYTHONPATH")
# Exceptions: read later, or without effect on results.
_NOT_READ_AT_IMPORT = ("TF_CONFIG", "TF_CPP_MIN_LOG_LEVEL", "CUDA_VISIBLE_DEVICES")

# A status can be read once. Two threads that read it, and starting a process reads those of all
# others, leave one of them with 255 for a process that ended well.
_reading = threading.Lock()


def status_of(process: BaseProcess) -> int | None:
    """The status, minus the signal that ended the process, or None while it runs."""
    with _reading:
        return process.exitcode


def wait_for(process: BaseProcess) -> int:
    """Wait for the end of a process, in any thread; returns its status."""
    connection.wait([process.sentinel])
    while (status := status_of(process)) is None:
        time.sleep(0.001)  # its pipe is closed just before it is gone
    return status


def start(argv: Sequence[str], env: Mapping[str, str], output: int) -> Started:
    """Start a task that runs a function; for `run_plan`.

    Args:
        argv: the command of `function_plan`; the last word is the file of the call.
    """
    process = start_function(function_task.main, (argv[-1],), env, output)
    assert process.pid is not None
    # Its server frees the id.
    return process.pid, functools.partial(wait_for, process), lambda: None


def start_function(
    function: Callable[..., object],
    args: Sequence[object],
    env: Mapping[str, str],
    output: int,
) -> BaseProcess:
    """Run a function of a module as the program of a process that leads a session of its own.

    If `env` differs in variables that are read during the import of TensorFlow, the process imports
    TensorFlow again.

    Args:
        env: the environment of the process.
        output: a descriptor for what the process writes.
    """
    # A connection, because a descriptor as a number cannot be sent to another process.
    file = Connection(os.dup(output), readable=False)
    is_ready, there = multiprocessing.Pipe(duplex=False)
    with _reading:
        process = _context(env).Process(
            target=_run, args=(function, tuple(args), file, there, dict(env))
        )
        process.start()
    there.close()
    with contextlib.suppress(EOFError):  # it has died
        is_ready.recv()
    return process


def _context(env: Mapping[str, str]) -> ForkServerContext | SpawnContext:
    if _read_at_import(env) == _start_server():
        return multiprocessing.get_context("forkserver")
    return multiprocessing.get_context("spawn")


@functools.cache
def _start_server() -> dict[str, str]:
    """Start the process to fork from, once; returns the variables that its libraries have read."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(_PRELOADED))
    forkserver.ensure_running()
    return _read_at_import(os.environ)


def _read_at_import(env: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in env.items()
        if name.startswith(_READ_AT_IMPORT) and name not in _NOT_READ_AT_IMPORT
    }


def _run(
    function: Callable[..., object],
    args: tuple[object, ...],
    output: Connection,
    is_ready: Connection,
    env: Mapping[str, str],
) -> None:
    """What the process does; it ends as Python ends a program."""
    os.setsid()  # its children are killed with it
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, errors="replace", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="replace", closefd=False)
    os.environ.clear()
    os.environ.update(env)
    output.close()
    is_ready.send(None)
    is_ready.close()
    failures.watch()
    try:
        function(*args)
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)
        raise SystemExit(1) from None
    finally:
        for thread in threading.enumerate():
            if thread is not threading.main_thread() and not thread.daemon:
                thread.join()
        atexit._run_exitfuncs()  # a coordinator tells its servers; multiprocessing calls none
