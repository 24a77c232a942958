"""Measures the overhead of a pytest test with two processes, with and without the plugin.

    .venv/bin/python benchmarks/second_test.py [--tests 5] [--markdown docs/testing.md]

In one run of pytest, tests with the plugin and tests that start both processes with `subprocess`
take turns. The overhead of a test is its time minus the time of its body (creating the strategy,
one sum) in the process that arrived last, because the other process waits for it. The run takes
about a minute.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Generator
from pathlib import Path

import pytest
from report import closing_line, put_into

PROGRAM = Path(__file__).resolve().parent / "programs" / "two_process_tests.py"
MARKERS = ("<!-- second_test begin -->", "<!-- second_test end -->")


class Taken:
    """A plugin of pytest: tests take turns, and how long each took."""

    def __init__(self, measured: Path):
        self._measured = measured
        self.costs: dict[str, list[float]] = {"plugin": [], "hand": []}
        self.bodies: list[float] = []

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        half = len(items) // 2
        items[:] = [item for pair in zip(items[:half], items[half:], strict=True) for item in pair]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        began = time.monotonic()
        done = yield
        seconds = time.monotonic() - began
        body = min(map(float, self._measured.read_text().split()), default=math.nan)
        self._measured.write_text("")
        kind = "plugin" if "with_the_plugin" in item.nodeid else "hand"
        self.costs[kind].append(seconds - body)
        if kind == "plugin":
            self.bodies.append(body)
        print(f" {item.name}: {seconds:.2f} s, body {body:.2f} s", flush=True)
        return done


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tests", type=int, default=5, help="of each kind")
    parser.add_argument("--markdown", type=Path, help="also write the table into this page")
    arguments = parser.parse_args()
    os.environ.pop("TF_CONFIG", None)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    with tempfile.TemporaryDirectory() as folder:
        measured = Path(folder) / "measured"
        measured.touch()
        os.environ |= {"TESTS": str(arguments.tests), "MEASURED": str(measured)}
        taken = Taken(measured)
        plain = ["-q", "-s", "-p", "no:cacheprovider", f"--rootdir={folder}"]
        status = pytest.main([str(PROGRAM), *plain, "-c", os.devnull], plugins=[taken])
    if status != pytest.ExitCode.OK:
        return int(status)
    text = table(taken, arguments.tests)
    print(f"\n{text}")
    if arguments.markdown:
        put_into(arguments.markdown, MARKERS, text)
    return 0


def table(taken: Taken, tests: int) -> str:
    first, *later = taken.costs["plugin"]
    plugin, hand = statistics.median(later), statistics.median(taken.costs["hand"])
    body = statistics.median(taken.bodies)
    lines = [
        f"| a test with two processes | seconds, without its body ({body:.2f} s) |",
        "|---|---|",
        f"| with the plugin, the first | {first:.2f} |",
        f"| with the plugin, each after it | {plugin:.2f} |",
        f"| by `subprocess` | {hand:.2f}, {hand / plugin:.0f} times as much |",
        *closing_line(tests),
    ]
    return "\n".join(lines).replace("rounds", "tests of each kind")


if __name__ == "__main__":
    sys.exit(main())
