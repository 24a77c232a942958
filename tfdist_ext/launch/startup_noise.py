"""The lines that TensorFlow writes at every start, kept from the screen.

TF_CPP_MIN_LOG_LEVEL does not hide them: they are written before TensorFlow reads it.
"""

from __future__ import annotations

import re

__all__ = ["StartupNoise"]

# "I0000 00:00:1795702528.736741    2947 port.cc:153] ", and
# "2026-11-26 12:13:14.567890: I tensorflow/core/util/port.cc:153] ". I: only information.
_INFORMATION = (
    r"(?:I\d{4} \d\d:\d\d:\d+(?:\.\d+)? +\d+ |\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+: I )"
    r"(?:[\w.+-]+/)*"
    r"(?:port|cudart_stub|cpu_feature_guard|grpc_server_lib|coordination_service(?:_agent)?"
    r"|eager_service_impl)\.(?:cc|h):\d+\] .*"
)
_NOISE = re.compile(
    rf"{_INFORMATION}"
    # A machine without a GPU. Other errors of CUDA are shown.
    r"|E\d{4} .* cuda_platform\.cc:\d+\] failed call to cuInit: .*"
    r"(?:UNKNOWN ERROR \(303\)|CUDA_ERROR_NO_DEVICE: .*)"
    r"|WARNING: All log messages before absl::InitializeLog\(\) is called are written to STDERR"
    r"|To enable the following instructions:[A-Z0-9_. ]+, in other operations, rebuild TensorFlow"
    r" with the appropriate compiler flags\."
)
# The lines that may follow such a line: a list of tasks; a protobuf that an empty line ends.
_FOLLOWING = {
    "] Example stragglers:": re.compile(r"/job:\w+/replica:\d+/task:\d+"),
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
