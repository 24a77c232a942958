"""Steps a second and bytes of PlacedStrategy beside what a user would pick instead.

    .venv/bin/python benchmarks/placed_speed.py [--rounds 3] [--markdown docs/performance.md]

Four logical CPUs, Adam. An MLP of 7.3M parameters, batches of 32, its kernels owned; and an
Embedding of 1M x 32 on CPU:0 with a dense part mirrored, batches of 256. Every round runs every
contestant once, each in a process of its own, so that a slow minute of the machine hits all of
them. Compared are medians over the rounds.
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
    arguments = parser.parse_args()
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


def measure(work: str, strategy: str, trainer: str, steps: int) -> Figures:
    """What one contestant prints, in a process of its own."""
    command = [sys.executable, str(PROGRAM), work, strategy, trainer, str(steps)]
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
