"""Warm processes: forked from a process that has imported TensorFlow and done nothing else.

Importing TensorFlow and Keras takes seconds; forking takes milliseconds. Python's forkserver holds
the imported modules. In each forked process TensorFlow is imported and has not started, so that no
device, no server and no cluster of an earlier test is left.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import connection, forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess

from tfdist_ext.launch import function_task

__all__ = ["WarmProcess", "start", "start_function"]

_PRELOADED = ("tensorflow", "keras", "tfdist_ext.training", "tfdist_ext.testing.isolated_run")
# Environment variables that libraries read when they are imported.
_READ_AT_IMPORT = ("TF_", "XLA_", "KERAS_", "OMP_", "OPENBLAS_", "MKL_", "CUDA_", "PYTHONPATH")
# Exceptions: read later, or without effect on results.
_NOT_READ_AT_IMPORT = ("TF_CONFIG", "TF_CPP_MIN_LOG_LEVEL", "CUDA_VISIBLE_DEVICES")

_environment: dict[str, str] | None = None  # of the forkserver, where it has started
# A status can be read once. Two threads that read it, and starting a process reads those of all
# others, leave one of them with 255 for a process that ended well.
_reading = threading.Lock()


class WarmProcess:
    """A process that has started, used as a `subprocess.Popen`; any thread may wait for it."""

    def __init__(self, process: BaseProcess):
        assert process.pid is not None
        self._process = process
        self.pid = process.pid

    def poll(self) -> int | None:
        """The status, minus the signal that ended it, or None while it runs."""
        with _reading:
            return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; the status.

        Raises:
            subprocess.TimeoutExpired: it still runs after `timeout` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        connection.wait([self._process.sentinel], timeout)
        while (status := self.poll()) is None:
            if deadline is not None and time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            time.sleep(0.001)  # its pipe is closed just before it is gone
        return status


def start(
    argv: Sequence[str], env: Mapping[str, str], output: int
) -> tuple[int, Callable[[], int]]:
    """Start a task that runs a function; for `run_plan`.

    Args:
        argv: the command of `function_plan`; the last word is the file of the call.
    """
    process = start_function(function_task.main, (argv[-1],), env, output)
    return process.pid, process.wait


def start_function(
    function: Callable[..., object],
    args: Sequence[object],
    env: Mapping[str, str],
    output: int,
    errors: int | None = None,
) -> WarmProcess:
    """Run a function of a module as the program of a process that leads a session of its own.

    Where `env` differs in variables that TensorFlow reads while it is imported, the process imports
    TensorFlow anew.

    Args:
        env: the environment of the process.
        output, errors: descriptors for what the process writes; by default, errors go to the
            output.
    """
    files = [_copy(output), _copy(output if errors is None else errors)]
    is_ready, there = multiprocessing.Pipe(duplex=False)
    with _reading:
        process = _context(env).Process(
            target=_run, args=(function, tuple(args), *files, there, dict(env))
        )
        process.start()
    there.close()
    with contextlib.suppress(EOFError):  # it has died
        is_ready.recv()
    return WarmProcess(process)


def _copy(descriptor: int) -> Connection:
    """A descriptor that can be sent to another process."""
    return Connection(os.dup(descriptor), readable=False)


def _context(env: Mapping[str, str]) -> ForkServerContext | SpawnContext:
    global _environment
    wanted = _read_at_import(env)
    context = multiprocessing.get_context("forkserver")
    if _environment is None and wanted == _read_at_import(os.environ):
        context.set_forkserver_preload(list(_PRELOADED))
        with _nothing_on_stderr():
            forkserver.ensure_running()
        _environment = wanted
    return context if wanted == _environment else multiprocessing.get_context("spawn")


@contextlib.contextmanager
def _nothing_on_stderr() -> Iterator[None]:
    """Hide what TensorFlow writes while it is imported; processes write to files."""
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


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
    errors: Connection,
    is_ready: Connection,
    env: Mapping[str, str],
) -> None:
    """What the process does; it ends as Python ends a program."""
    os.setsid()  # its children are killed with it
    os.dup2(output.fileno(), 1)
    os.dup2(errors.fileno(), 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, errors="replace", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="replace", closefd=False)
    os.environ.clear()
    os.environ.update(env)
    for pipe in (output, errors):
        pipe.close()
    is_ready.send(None)
    is_ready.close()
    status = 0
    try:
        function(*args)
    except SystemExit as error:
        if isinstance(error.code, int | None):
            status = error.code or 0
        else:
            print(error.code, file=sys.stderr)
            status = 1
    except BaseException as error:
        sys.last_value = error  # as Python does; exit functions read it
        sys.excepthook(type(error), error, error.__traceback__)
        status = 1
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()  # a coordinator tells its servers; multiprocessing calls none
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # TensorFlow's threads may wait for peers forever
