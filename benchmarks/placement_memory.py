"""Compares the coordinator's peak memory for a large embedding with plain TensorFlow.

    .venv/bin/python benchmarks/placement_memory.py

The program creates a table of 3 GiB in four shards on parameter servers, saves it, and restores it
as one shard on one server. The figures are the peak memory of the coordinator's process minus its
memory before.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from clusters import output_of_chief
from report import closing_line, put_into

PROGRAM = Path(__file__).parent / "programs" / "placement_memory.py"
MARKERS = ("<!-- placement_memory begin -->", "<!-- placement_memory end -->")
SERVERS = 4
ROW_BYTES = 64 * 4
CONTESTANTS = {
    "tfdist_ext": "tfd.create_strategy and distribute",
    "tensorflow": "ParameterServerStrategy with FixedShardsPartitioner",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=3.0, help="size of the table (default 3)")
    parser.add_argument("--markdown", type=Path, help="also write the table into this page")
    arguments = parser.parse_args()
    size = int(arguments.gib * 2**30)
    lines = [
        "",
        f"| a table of {arguments.gib:g} GiB on {SERVERS} ps | memory of the coordinator |",
        "|---|---|",
    ]
    for contestant, name in CONTESTANTS.items():
        command = [sys.executable, str(PROGRAM), contestant, str(size // ROW_BYTES)]
        for what, found in peaks(command).items():
            print(f"{name}: {what}: {found}", flush=True)
            lines.append(f"| {name}: {what} | {found} |")
    text = "\n".join(lines + closing_line(1))
    print(f"\n{text}")
    if arguments.markdown:
        put_into(arguments.markdown, MARKERS, text)
    return 0


def peaks(command: list[str]) -> dict[str, str]:
    """What the coordinator did -> its peak meanwhile, and the error where that ended it."""
    status, log = output_of_chief(command, workers=1, ps=SERVERS)
    found = dict(re.findall(r"^peak of (.*): (.* MiB)$", log, re.MULTILINE))
    if status != 0:
        errors = [line for line in log.splitlines() if re.match(r"[\w.]*Error: ", line)]
        why = errors[-1].rpartition("errors_impl.")[2][:38] if errors else f"status {status}"
        last = list(found)[-1] if found else "start"
        found[last] = f"{found.get(last, '')}, then it fails: {why}"
    return found


if __name__ == "__main__":
    raise SystemExit(main())
