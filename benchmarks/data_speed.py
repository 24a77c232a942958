"""Compares the speed of shuffled records with a plain tf.data pipeline, in one run.

    .venv/bin/python benchmarks/data_speed.py [--rounds 2] [--markdown docs/performance.md]

Each round runs each method once, in a separate process, so that a slow minute of the machine
affects all of them. The tables show medians over the rounds. A round takes about two minutes.
`--times 5` reads five times as many records.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from report import closing_line, put_into

PROGRAM = Path(__file__).resolve().parent / "programs" / "data_speed.py"
MARKERS = ("<!-- data_speed begin -->", "<!-- data_speed end -->")
OURS = "tfdist_ext"
SMALL_BUFFER = 1000

# Bytes of a record -> (records, records of a batch).
SIZES = {84: (150_000, 256), 1000: (100_000, 256), 10_000: (30_000, 128), 100_000: (5_000, 32)}
KINDS = {"one": "parsed one by one", "batch": "parsed in batches"}

Figures = dict[str, float]  # what a process printed: made, first, after, whole, memory


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--times", type=float, default=1.0, help="so many times the records")
    parser.add_argument("--markdown", type=Path, help="also write the tables into this page")
    arguments = parser.parse_args()
    sizes = {size: (int(n * arguments.times), batch) for size, (n, batch) in SIZES.items()}
    found: dict[tuple[int, str, str], list[Figures]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for size, (records, batch) in sizes.items():
            Path(f"{folder}/{size}").mkdir()
            run("write", "one", f"{folder}/{size}", size, records, batch)
        for turn in range(arguments.rounds):
            for size, (records, batch) in sizes.items():
                for kind, name, contestant in contestants(records):
                    printed = run(contestant, kind, f"{folder}/{size}", size, records, batch)
                    print(f"round {turn + 1}: {size} bytes, {kind}: {name}: {printed}", flush=True)
                    words = printed.split()
                    figures = dict(zip(words[::2], map(float, words[1::2]), strict=True))
                    found.setdefault((size, kind, name), []).append(figures)
    text = tables(sizes, found, arguments.rounds)
    print(f"\n{text}")
    if arguments.markdown:
        put_into(arguments.markdown, MARKERS, text)
    return 0


def contestants(records: int) -> list[tuple[str, str, str]]:
    """What parse takes, the name, and the program's word for it."""
    full = "tf.data, a buffer of all records"
    small = f"tf.data, a buffer of {SMALL_BUFFER:,}"
    return [
        ("one", OURS, "tfdist_ext"),
        ("one", full, str(records)),
        ("one", small, str(SMALL_BUFFER)),
        ("batch", OURS, "tfdist_ext"),
        ("batch", full, str(records)),
    ]


def run(*arguments: object) -> str:
    """What the program prints."""
    command = [sys.executable, str(PROGRAM), *map(str, arguments)]
    done = subprocess.run(command, timeout=300, text=True, capture_output=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return done.stdout.strip()


def tables(
    sizes: dict[int, tuple[int, int]],
    found: dict[tuple[int, str, str], list[Figures]],
    rounds: int,
) -> str:
    lines: list[str] = []
    for kind, title in KINDS.items():
        lines += [
            "",
            f"| {title} | first batch | examples/s, whole epoch | tfdist_ext is"
            " | examples/s after the first batch | tfdist_ext is | memory |",
            "|---|---|---|---|---|---|---|",
        ]
        for size, (records, batch) in sizes.items():
            lines.append(f"| **{records:,} of {size:,} bytes, batches of {batch}** | | | | | | |")
            medians = {
                name: {what: statistics.median(one[what] for one in each) for what in each[0]}
                for (of_size, of_kind, name), each in found.items()
                if (of_size, of_kind) == (size, kind)
            }
            for name, figures in medians.items():
                cells = [name, f"{figures['first']:.2f} s"]
                for what in ("whole", "after"):
                    ratio = medians[OURS][what] / figures[what]
                    cells.append(f"{figures[what]:,.0f}")
                    cells.append("" if name == OURS else f"{ratio:.2f} x as fast")
                lines.append(f"| {' | '.join(cells)} | {figures['memory']:.0f} MiB |")
    made = {
        name: statistics.median(
            one["made"] for (_, _, of), each in found.items() if of == name for one in each
        )
        for _, name, _ in contestants(1)
    }
    said = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in made.items())
    lines += ["", f"Creating the dataset, once before the epoch: {said}."]
    return "\n".join(lines + closing_line(rounds))


if __name__ == "__main__":
    raise SystemExit(main())
