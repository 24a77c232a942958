"""Compares the time to the first step of `fit` with a hand-written training loop.

    .venv/bin/python benchmarks/first_step.py [--rounds 3] [--replicas 1 4 8 16] [--models MLP ...]
        [--markdown docs/performance.md]
    .venv/bin/python benchmarks/first_step.py --processes 2 [--markdown docs/choosing.md]

Each round runs each method once, in a separate process, so that a slow minute of the machine
affects all of them. The tables show the median, the smallest and the largest figure. The second
command compares one process for all devices with one process for each device.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
from pathlib import Path

from report import closing_line, put_into

PROGRAM = Path(__file__).resolve().parent / "programs" / "first_step.py"
MARKERS = ("<!-- first_step begin -->", "<!-- first_step end -->")
MODELS = ("MLP 64-256-10", "4-layer transformer, d=128", "ResNet50")
ROWS = 32  # of a global batch
PROCESSES = "a process for each device"
BY_HAND = 4  # replicas of the hand-written loop; more replicas take minutes

# First step in seconds, and megabytes of all processes.
Measured = tuple[float, float]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument(
        "--processes", type=int, nargs="+", help="beside it, as many workers of one device each"
    )
    parser.add_argument("--models", nargs="+", default=MODELS, help="beginnings of their names")
    parser.add_argument("--markdown", type=Path, help="also write the table into this page")
    arguments = parser.parse_args()
    models = [name for name in MODELS if name.startswith(tuple(arguments.models))]
    contestants = [("fit", replicas) for replicas in arguments.replicas]
    contestants.append(("hand-written loop", BY_HAND))
    if arguments.processes:
        contestants = [("fit", 1)]
        for count in arguments.processes:
            contestants += [("fit", count), (PROCESSES, count)]
    found: dict[tuple[str, str, int], list[Measured]] = {}
    for turn in range(arguments.rounds):
        for model in models:
            for how, replicas in contestants:
                measured = measure(how, model, replicas)
                found.setdefault((model, how, replicas), []).append(measured)
                print(f"round {turn + 1}: {model}, {how}, {replicas}: {measured}", flush=True)
    relative = "relative to one device"
    lines = ["", f"| first step | replicas | seconds | {relative} | MB | {relative} |"]
    lines.append("|---|---|---|---|---|---|")
    for model in models:
        alone = found[model, *contestants[0]]
        for how, replicas in contestants:
            lines.append(row(model, how, replicas, found[model, how, replicas], alone))
    text = "\n".join(lines + closing_line(arguments.rounds))
    print(f"\n{text}")
    if arguments.markdown:
        put_into(arguments.markdown, MARKERS, text)
    return 0


def measure(how: str, model: str, replicas: int) -> Measured:
    command = [sys.executable, str(PROGRAM), how, model, str(replicas), str(ROWS)]
    if how == PROCESSES:
        launcher = str(Path(sys.executable).with_name("tfdist"))
        options = ["--workers", str(replicas)]
        command = [launcher, "run", *options, "--", *command]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    figures = re.findall(r"first (\S+) megabytes (\S+)", done.stdout)
    if not figures:
        raise SystemExit(f"{command} failed:\n{done.stdout}\n{done.stderr}")
    first, megabytes = zip(*(map(float, each) for each in figures), strict=True)
    return max(first), sum(megabytes)


def row(
    model: str, how: str, replicas: int, rounds: list[Measured], of_one_device: list[Measured]
) -> str:
    first, megabytes = zip(*rounds, strict=True)
    alone, most = zip(*of_one_device, strict=True)
    middle = statistics.median(first)
    return (
        f"| {model}, {how} | {replicas} | {middle:.1f} ({min(first):.1f} to {max(first):.1f}) |"
        f" {middle / statistics.median(alone):.1f} x | {max(megabytes):.0f} |"
        f" {max(megabytes) / max(most):.1f} x |"
    )


if __name__ == "__main__":
    sys.exit(main())
