"""Warm processes: forked from a process that has imported TensorFlow and done nothing else.

Importing TensorFlow and Keras takes seconds; forking takes milliseconds. Python's forkserver holds
the imported modules. Each process forked from it has a TensorFlow of its own, which has not
started: no device, no server and no cluster of an earlier test is left in it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import connection, forkserver
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from typing import Any

from tfdist_ext.errors import LaunchError

__all__ = ["WarmProcess", "start"]

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
    """A process that has started; any thread may ask for its end."""

    def __init__(self, process: BaseProcess):
        assert process.pid is not None
        self._process = process
        self.pid = process.pid
        self.sentinel = process.sentinel  # ready when the process has ended

    @property
    def exitcode(self) -> int | None:
        """The status, minus the signal that ended it, or None while it runs."""
        with _reading:
            return self._process.exitcode

    def join(self, timeout: float | None = None) -> int | None:
        """Wait for the end for `timeout` seconds at most; the exit code, or None."""
        deadline = None if timeout is None else time.monotonic() + timeout
        connection.wait([self.sentinel], timeout)
        while (status := self.exitcode) is None and (not deadline or time.monotonic() < deadline):
            time.sleep(0.001)  # its pipe is closed just before it is gone
        return status

    def send_signal(self, number: int) -> None:
        """Do nothing where it has ended."""
        if self.exitcode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


def start(target: Callable[..., None], *args: Any, env: Mapping[str, str]) -> WarmProcess:
    """Start `target(*args)` in a process of its own, whose environment is to be `env`.

    Where `env` differs in what is read while TensorFlow is imported, the process imports it anew.

    Raises:
        LaunchError: `target` or `args` cannot be sent to another process.
    """
    try:
        with _reading:
            process = _context(env).Process(target=target, args=args)
            process.start()
    except (AttributeError, TypeError, ValueError, pickle.PicklingError) as error:
        raise LaunchError(
            f"the function for another process and its arguments must be picklable, got: {error}."
            " Define the function at the top level of a module, and give it arguments that pickle"
            " can handle."
        ) from error
    return WarmProcess(process)


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
    """What TensorFlow writes while it is imported is of no test; processes write to files."""
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
