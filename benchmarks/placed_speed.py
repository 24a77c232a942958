"""Compares the speed and memory of PlacedStrategy with the alternatives.

    .venv/bin/python benchmarks/placed_speed.py [--rounds 3] [--markdown docs/performance.md]
    .venv/bin/python benchmarks/placed_speed.py --sizes [--markdown docs/performance.md]

The models train on four logical CPUs with Adam. The first is an MLP of 7.3M parameters, with
batches of 32, whose kernels have owners. The second is an Embedding of 1M x 32 on CPU:0 with a
mirrored dense part, and batches of 256. Each round runs each method once, in a separate process, so
that a slow minute of the machine affects all of them. The tables show medians over the rounds.
--sizes compares PlacedStrategy with MirroredStrategy, for MLPs of several sizes on several numbers
of devices.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from report import closing_line, put_into

PROGRAM = Path(__file__).resolve().parent / "programs" / "placed_fit.py"
MARKERS = ("<!-- placed_speed begin -->", "<!-- placed_speed end -->")
MARKERS_OF_SIZES = ("<!-- placed_sizes begin -->", "<!-- placed_sizes end -->")
OURS = "PlacedStrategy, tfdist_ext fit"

# name -> (strategy, who trains, steps of the MLP, steps of the embedding): 5 to 20 seconds each
CONTESTANTS: dict[str, tuple[str, str, int, int]] = {
    OURS: ("placed", "tfdist_ext", 160, 30),
    "MirroredStrategy, Keras fit": ("mirrored", "keras", 30, 5),
    "MirroredStrategy, tfdist_ext fit": ("mirrored", "tfdist_ext", 60, 5),
    "CentralStorageStrategy, Keras fit": ("central_storage", "keras", 120, 20),
    "CentralStorageStrategy, tfdist_ext fit": ("central_storage", "tfdist_ext", 160, 30),
    "one device, Keras fit": ("one_device", "keras", 300, 20),
}
WORKS = {
    "mlp": "MLP of 7.3M parameters, batches of 32",
    "embedding": "Embedding of 1M x 32 and a dense part, batches of 256",
}


# (millions of parameters, width of 8 layers, steps), by size
SIZES = [(1, 353, 160), (7.3, 956, 40), (50, 2500, 6)]
DEVICES = [2, 4, 8]
COMPARED = [OURS, "MirroredStrategy, Keras fit", "MirroredStrategy, tfdist_ext fit"]


class Figures(NamedTuple):
    """Of one process: steps a second; bytes on the fullest device, and on all together."""

    speed: float
    optimizer: int
    everything: int


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work", choices=list(WORKS), action="append")
    parser.add_argument("--markdown", type=Path, help="also write the tables into this page")
    parser.add_argument("--sizes", action="store_true", help="by size and number of devices")
    arguments = parser.parse_args()
    if arguments.sizes:
        return by_size(arguments.rounds, arguments.markdown)
    works = arguments.work or list(WORKS)
    found: dict[tuple[str, str], list[Figures]] = {}
    for turn in range(arguments.rounds):
        for work in works:
            for name, (strategy, trainer, *steps) in CONTESTANTS.items():
                count = steps[list(WORKS).index(work)]
                figures = measure(work, strategy, trainer, count)
                found.setdefault((work, name), []).append(figures)
                print(f"round {turn + 1}: {work}: {name}: {figures}", flush=True)
    lines: list[str] = []
    for work in works:
        lines += table(WORKS[work], {name: found[work, name] for name in CONTESTANTS})
    text = "\n".join(lines + closing_line(arguments.rounds))
    print(f"\n{text}")
    if arguments.markdown:
        put_into(arguments.markdown, MARKERS, text)
    return 0


def by_size(rounds: int, markdown: Path | None) -> int:
    found: dict[tuple[float, int, str], list[float]] = {}
    for turn in range(rounds):
        for size, width, steps in SIZES:
            for devices in DEVICES:
                for name in COMPARED:
                    speed = measure("mlp", *CONTESTANTS[name][:2], steps, width, devices).speed
                    found.setdefault((size, devices, name), []).append(speed)
                    print(f"round {turn + 1}: {size}M, {devices}: {name}: {speed}", flush=True)
    columns = f"{OURS}, steps/s | relative to Keras fit | relative to tfdist_ext fit, mirrored"
    lines = ["", f"| MLP, devices | {columns} |"]
    lines.append("|---|---|---|---|")
    for size, *_ in SIZES:
        for devices in DEVICES:
            medians = [statistics.median(found[size, devices, name]) for name in COMPARED]
            ratios = [f"{medians[0] / other:.1f} x" for other in medians[1:]]
            spread = found[size, devices, OURS]
            ours = f"{medians[0]:.1f} ({min(spread):.1f} to {max(spread):.1f})"
            lines.append(f"| {size}M, {devices} | {ours} | {' | '.join(ratios)} |")
    text = "\n".join(lines + closing_line(rounds))
    print(f"\n{text}")
    if markdown:
        put_into(markdown, MARKERS_OF_SIZES, text)
    return 0


def measure(work: str, strategy: str, trainer: str, steps: int, *shape: int) -> Figures:
    """What one contestant prints, in a process of its own.

    Args:
        shape: of an MLP, the width of its layers and the number of devices, where they are others.
    """
    command = [sys.executable, str(PROGRAM), work, strategy, trainer, *map(str, (steps, *shape))]
    run = subprocess.run(
        command,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"},
        timeout=600,
        text=True,
        capture_output=True,
    )
    if run.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed: {run.returncode}\n{run.stderr[-3000:]}")
    said = dict(re.findall(r"^(steps/s|optimizer bytes|weight bytes) (.*)$", run.stdout, re.M))
    optimizer, weights = (
        list(map(int, said[f"{what} bytes"].split())) for what in ("optimizer", "weight")
    )
    return Figures(float(said["steps/s"]), max(optimizer), sum(optimizer) + sum(weights))


def table(title: str, found: dict[str, list[Figures]]) -> list[str]:
    speeds = {name: statistics.median(f.speed for f in each) for name, each in found.items()}
    lines = [
        "",
        f"| {title} | steps/s | PlacedStrategy is | optimizer on the fullest device |"
        " variables and slots in all |",
        "|---|---|---|---|---|",
    ]
    for name, each in found.items():
        ratio = "" if name == OURS else f"{speeds[OURS] / speeds[name]:.2f} x as fast"
        sizes = f"{each[0].optimizer / 1e6:.1f} MB | {each[0].everything / 1e6:.0f} MB"
        lines.append(f"| {name} | {speeds[name]:.1f} | {ratio} | {sizes} |")
    return lines


if __name__ == "__main__":
    raise SystemExit(main())
