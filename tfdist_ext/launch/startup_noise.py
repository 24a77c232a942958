"""The lines that TensorFlow writes at every start, kept from the screen.

Run as a program, this file copies its standard input to standard error without them. Only the
standard library is imported, to start in milliseconds.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

__all__ = ["StartupNoise", "add_raw_option", "without_startup_noise"]

# "I0000 00:00:1795702528.736741    2947 port.cc:153] ", and
# "2026-11-26 12:13:14.567890: I tensorflow/core/util/port.cc:153] ".
_HEADER = (
    r"(?:[IWE]\d{4} \d\d:\d\d:\d+(?:\.\d+)? +\d+ |\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+: [IWE] )"
    r"(?:[\w.+-]+/)*"
)
_TASK = r"/job:\w+/replica:\d+/task:\d+"
_MESSAGES = (  # each whole, behind the name of its file
    r"port\.cc:\d+\] oneDNN custom operations are on\. You may see slightly different numerical"
    r" results due to floating-point round-off errors from different computation orders\. To turn"
    r" them off, set the environment variable `TF_ENABLE_ONEDNN_OPTS=0`\.",
    r"cudart_stub\.cc:\d+\] Could not find cuda drivers on your machine, GPU will not be used\.",
    r"cuda_platform\.cc:\d+\] failed call to cuInit: INTERNAL: CUDA error: Failed call to cuInit:"
    r" (?:UNKNOWN ERROR \(303\)|CUDA_ERROR_NO_DEVICE: no CUDA-capable device is detected)",
    r"cuda_(?:fft|dnn|blas)\.cc:\d+\] Unable to register cu\w+ factory: Attempting to register"
    r" factory for plugin cu\w+ when one has already been registered",
    r"computation_placer\.cc:\d+\] computation placer already registered\. Please check linkage"
    r" and avoid linking the same target more than once\.",
    r"cpu_feature_guard\.cc:\d+\] This TensorFlow binary is optimized to use available CPU"
    r" instructions in performance-critical operations\.",
    r"grpc_server_lib\.cc:\d+\] Started server with target: grpc://\S+",
    r"coordination_service\.cc:\d+\] Initializing CoordinationService",
    rf"coordination_service\.h:\d+\] {_TASK} has connected to coordination service\."
    r" Incarnation: \d+",
    r"coordination_service\.cc:\d+\] Waiting for \d+/\d+ tasks to connect\.",
    r"coordination_service\.cc:\d+\] Example stragglers:",
    r"coordination_service_agent\.cc:\d+\] Coordination agent has successfully connected\.",
    r"coordination_service\.cc:\d+\] Barrier\(WaitForAllTasks::\d+::\d+\) has passed with status:"
    r" OK",
    r"eager_service_impl\.cc:\d+\] Creating sync eager service context with rendezvous_id on host"
    rf" \S+ {_TASK}",
    r"eager_service_impl\.cc:\d+\] SessionOptions:[\w./ ]*",
)
_NOISE = re.compile(
    rf"{_HEADER}(?:{'|'.join(_MESSAGES)})"
    r"|WARNING: All log messages before absl::InitializeLog\(\) is called are written to STDERR"
    r"|To enable the following instructions:[A-Z0-9_. ]+, in other operations, rebuild TensorFlow"
    r" with the appropriate compiler flags\."
)
# The lines that may follow such a line: a list of tasks; a protobuf that an empty line ends.
_FOLLOWING = {
    "] Example stragglers:": re.compile(_TASK),
    "] SessionOptions:": re.compile(r"(?: *(?:\w+: \S+|\w+ \{|\}))?"),
}


class StartupNoise:
    """Knows the lines of one process, one after another."""

    def __init__(self) -> None:
        self._following: re.Pattern[str] | None = None

    def has(self, line: str) -> bool:
        """Whether the next line, without its end, is one that TensorFlow writes at every start."""
        if self._following is not None and self._following.fullmatch(line):
            if not line:
                self._following = None
            return True
        noise = _NOISE.fullmatch(line) is not None
        found = (lines for end, lines in _FOLLOWING.items() if noise and end in line)
        self._following = next(found, None)
        return noise


def add_raw_option(parser: argparse.ArgumentParser) -> None:
    """Declare --raw of a command that imports TensorFlow."""
    help = "show what TensorFlow writes at every start, too"
    parser.add_argument("--raw", action="store_true", help=help)


@contextlib.contextmanager
def without_startup_noise(*, raw: bool) -> Iterator[None]:
    """Scope in which what this process writes to standard error comes without these lines.

    Args:
        raw: with them, after all.
    """
    if raw:
        yield
        return
    sys.stderr.flush()
    # A process, not a thread: it shows what was written also where this one crashes.
    words = [sys.executable, "-S", "-E", __file__]
    copier = subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True)
    assert copier.stdin is not None
    before = os.dup(2)
    os.dup2(copier.stdin.fileno(), 2)
    copier.stdin.close()
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(before, 2)
        os.close(before)
        with contextlib.suppress(subprocess.TimeoutExpired):  # a child of ours may go on writing
            copier.wait(timeout=5.0)


def main() -> None:
    for number in (signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    noise = StartupNoise()
    for line in sys.stdin.buffer:
        if not noise.has(line.decode(errors="replace").rstrip("\r\n")):
            sys.stderr.buffer.write(line)
            sys.stderr.buffer.flush()


if __name__ == "__main__":
    main()
