"""Measures the time to import the pytest plugin in a session that does not use it.

    .venv/bin/python benchmarks/plugin_import.py [--rounds 21] [--markdown docs/testing.md]

In each round, a process imports pytest and then the plugin, as pytest does, with all modules that
the plugin imports. Byte code is compiled before the first round, as pip does at installation. A
median of 10 ms or more is a failure.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from report import put_into, python_line

MARKERS = ("<!-- plugin_import begin -->", "<!-- plugin_import end -->")
LIMIT = 10.0  # milliseconds
PROGRAM = """
import sys, time
import pytest
before = set(sys.modules)
began = time.perf_counter()
import tfdist_ext.testing.plugin
print(1000 * (time.perf_counter() - began), len(set(sys.modules) - before))
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--markdown", type=Path, help="also write the figures into this page")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as byte_code:
        env = {**os.environ, "PYTHONPYCACHEPREFIX": byte_code}
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        measured = [_measure(env) for _ in range(arguments.rounds + 1)][1:]
    milliseconds = statistics.median(time for time, _ in measured)
    text = "\n".join(
        [
            "| importing the plugin | |",
            "|---|---|",
            f"| milliseconds | {milliseconds:.1f} |",
            f"| modules that pytest does not import | {measured[0][1]} |",
            "",
            f"Median of {arguments.rounds} processes; {python_line()}.",
        ]
    )
    print(text)
    if arguments.markdown:
        put_into(arguments.markdown, MARKERS, text)
    return int(milliseconds >= LIMIT)


def _measure(env: dict[str, str]) -> tuple[float, int]:
    command = [sys.executable, "-c", PROGRAM]
    time, modules = subprocess.check_output(command, env=env, text=True, timeout=60).split()
    return float(time), int(modules)


if __name__ == "__main__":
    sys.exit(main())
