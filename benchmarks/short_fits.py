"""Compares short trainings, with their start and end: `fit` and a hand-written loop.

    .venv/bin/python benchmarks/short_fits.py [--rounds 3] [--markdown docs/performance.md]

Each round runs each method once, in separate processes, so that a slow minute of the machine
affects all of them. The tables show the median, the smallest and the largest figure. The
hand-written loop keeps its iterator from one training to the next, and reads two metrics after each
training.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

from fit_speed import measure
from report import closing_line, put_into

MARKERS = ("<!-- short_fits begin -->", "<!-- short_fits end -->")
MLP, TRANSFORMER = "MLP 64-256-10", "4-layer transformer, d=128"
RESNET, EMBEDDING = "ResNet50", "Embedding of 100,000 x 32"
FIT, PLACED, XLA = ("fit", "plain"), ("fit", "PlacedStrategy"), ("fit", "jit_compile")
HAND = "hand-written loop", "plain"

# title -> (workers; 0: a process without a cluster, model, rows of a global batch, steps of a
# training, trainings, contestants; the others are compared with the last one).
SETTINGS: dict[str, tuple[int, str, int, int, int, list[tuple[str, str]]]] = {
    "2 workers, transformer, 32 steps": (2, TRANSFORMER, 32, 32, 3, [XLA, HAND]),
    "mirrored on 4 logical CPUs, MLP, 1,024 steps": (0, MLP, 64, 1024, 5, [FIT, PLACED, HAND]),
    "mirrored on 4 logical CPUs, transformer, 32 steps": (
        0, TRANSFORMER, 32, 32, 3, [FIT, XLA, PLACED, HAND]
    ),
    "mirrored on 4 logical CPUs, ResNet50, 8 steps": (0, RESNET, 32, 8, 1, [FIT, PLACED, HAND]),
    "mirrored on 4 logical CPUs, Embedding of 100,000 x 32, 64 steps": (
        0, EMBEDDING, 64, 64, 3, [FIT, PLACED, HAND]
    ),
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--settings", nargs="*", default=[""], help="those with this in the title")
    parser.add_argument("--markdown", type=Path, help="also write the tables into this page")
    arguments = parser.parse_args()
    settings = {
        title: setting
        for title, setting in SETTINGS.items()
        if any(part in title for part in arguments.settings)
    }
    found: dict[tuple[str, str, str], list[float]] = {}
    for turn in range(arguments.rounds):
        for title, (workers, model, rows, steps, trainings, contestants) in settings.items():
            strategy = "multi_worker_mirrored" if workers else "mirrored"
            for how, extra in contestants:
                program = ["short_fits.py", how, strategy, model, str(rows), str(steps), extra]
                speed = measure(workers, trainings, sys.executable, program)
                found.setdefault((title, how, extra), []).append(speed)
                print(f"round {turn + 1}: {title}: {how}, {extra}: {speed:.1f}", flush=True)
    lines = []
    for title, (*_, contestants) in settings.items():
        lines += ["", f"| {title} | steps/s | relative to hand-written loop |", "|---|---|---|"]
        last = statistics.median(found[title, *contestants[-1]])
        for how, extra in contestants:
            speeds = found[title, how, extra]
            median, name = statistics.median(speeds), how if extra == "plain" else f"fit, {extra}"
            spread = f"{min(speeds):.0f} to {max(speeds):.0f}"
            lines.append(f"| {name} | {median:.1f} ({spread}) | {median / last:.2f} x |")
    text = "\n".join(lines + closing_line(arguments.rounds))
    print(f"\n{text}")
    if arguments.markdown:
        put_into(arguments.markdown, MARKERS, text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
