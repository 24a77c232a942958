"""Compares the speed of embedding tables with the alternatives.

    .venv/bin/python benchmarks/embedding_speed.py [--rounds 3] [--markdown docs/performance.md]
    .venv/bin/python benchmarks/embedding_speed.py --memory [--gib 3] [--optimizers sgd adagrad]

The first model is Embedding(rows, 32) and Dense(1), with batches of 256, and SGD unless the name
says otherwise. It trains on a chief, two workers and two parameter servers, all on this machine.
The second model has 26 tables of 100,000 rows of 16. It trains with Adam on two logical CPUs and on
two workers. Each round runs each method once, so that a slow minute of the machine affects all of
them. The tables show medians over the rounds, and the largest peak memory of a server.

With --memory, two tables of --gib in all train for 200 steps on two servers, write a checkpoint,
and resume in new processes. The chief may not allocate more than --limit MiB after its start. The
table shows the peak of a process beside the memory that `tfdist plan` prints, in MiB. With --host,
the tables are in the memory of one process, under `placed` and `central_storage`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from clusters import outputs_of_tasks
from fit_speed import LEGACY_PYTHON, PROGRAMS, prepare_legacy
from report import closing_line, put_into, table

MILLION = 1_000_000
MARKERS = ("<!-- embedding_speed begin -->", "<!-- embedding_speed end -->")
OURS = "tfdist_ext fit"

# name -> (interpreter, program, rows of the table, steps of an epoch, epochs, optimizer of ours):
# 3 to 20 seconds each
ON_SERVERS: dict[str, tuple[str | int, ...]] = {
    OURS: (sys.executable, "embedding_fit.py", MILLION, 1000, 5),
    "hand-written ClusterCoordinator loop": (
        sys.executable, "embedding_hand_loop.py", MILLION, 1000, 5,
    ),
    "tf_keras fit": (LEGACY_PYTHON, "embedding_tf_keras.py", MILLION, 100, 2),
    f"{OURS}, 10k rows": (sys.executable, "embedding_fit.py", 10_000, 1000, 5),
    f"{OURS}, 4M rows": (sys.executable, "embedding_fit.py", 4 * MILLION, 1000, 5),
    **{
        f"{OURS}, {name}, {size} rows": (
            sys.executable, "embedding_fit.py", rows, 1000, 5, *words,
        )
        for name, words in {"Adagrad": ("adagrad",), "lazy Adam": ("adam", "lazy")}.items()
        for size, rows in {"10k": 10_000, "1M": MILLION, "4M": 4 * MILLION}.items()
    },
    f"{OURS}, Adam, 1M rows": (sys.executable, "embedding_fit.py", MILLION, 50, 2, "adam"),
}  # fmt: skip
# name -> (interpreter, method of tables_fit.py, steps)
OF_TABLES = {
    f"{OURS}, lazy Adam": (sys.executable, "lazy", 200),
    f"{OURS}, Adam": (sys.executable, "fit", 20),
    "hand-written in-graph loop, Adam": (sys.executable, "hand-written loop", 20),
    "tf_keras fit, Adam": (LEGACY_PYTHON, "tf_keras", 20),
}
SETTINGS = {"mirrored": "MirroredStrategy, 2 logical CPUs", "multi_worker_mirrored": "2 workers"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--markdown", type=Path, help="also write the table into this page")
    parser.add_argument("--memory", action="store_true", help="measure memory instead of speed")
    parser.add_argument("--gib", type=float, default=3.0, help="with --memory: size of the tables")
    parser.add_argument("--limit", type=int, default=1024, help="with --memory: of the chief, MiB")
    parser.add_argument("--optimizers", nargs="+", default=["sgd"], help="with --memory")
    parser.add_argument("--host", action="store_true", help="with --memory: in one process")
    parser.add_argument("--lazy", action="store_true", help="with --memory: lazy_updates=True")
    arguments = parser.parse_args()
    if arguments.memory:
        return memory_of_tables(arguments)
    prepare_legacy()
    speeds: dict[tuple[str, str], list[float]] = {}
    memory: dict[str, int] = {}
    servers = "1M rows of 32, 2 workers, 2 ps"
    for turn in range(arguments.rounds):
        for name, (python, program, *words) in ON_SERVERS.items():
            command = [str(python), str(PROGRAMS / str(program)), *map(str, words)]
            speed, peak = measure(command)
            speeds.setdefault((servers, name), []).append(speed)
            memory[name] = max(peak, memory.get(name, 0))
            print(f"round {turn + 1}: {name}: {speed:.1f} steps/s, {peak} MiB", flush=True)
        for strategy, title in SETTINGS.items():
            for name, (python, method, steps) in OF_TABLES.items():
                program = str(PROGRAMS / "tables_fit.py")
                command = [python, program, method, strategy, "adam", str(steps)]
                speed = measure_tables(command, strategy)
                speeds.setdefault((f"26 tables, {title}", name), []).append(speed)
                print(f"round {turn + 1}: {title}: {name}: {speed:.1f} steps/s", flush=True)
    lines = []
    for title in dict.fromkeys(title for title, _ in speeds):
        medians = {
            name: statistics.median(each) for (of, name), each in speeds.items() if of == title
        }
        columns = {"MiB_of_a_server": {name: f"{peak:,}" for name, peak in memory.items()}}
        lines += table(title, medians, next(iter(medians)), **(columns if title == servers else {}))
    text = "\n".join(lines + closing_line(arguments.rounds))
    print(f"\n{text}")
    if arguments.markdown:
        put_into(arguments.markdown, MARKERS, text)
    return 0


def memory_of_tables(arguments: argparse.Namespace) -> int:
    program = str(PROGRAMS / "embedding_memory.py")
    rows = str(int(arguments.gib * 2**30 / 2 / 32 / 4))
    limit = "0" if arguments.host else str(arguments.limit)
    kinds = ("placed", "central_storage") if arguments.host else ("parameter_server",)
    print("| strategy, optimizer, run | variables and slots | `tfdist plan` | task | chief |")
    for kind, optimizer in itertools.product(kinds, arguments.optimizers):
        with tempfile.TemporaryDirectory() as parent:
            folder = f"{parent}/checkpoints"
            os.mkdir(folder)
            for epochs, run in enumerate(("build, steps, checkpoint", "build, resume, steps"), 1):
                command = [sys.executable, program, kind, rows, optimizer, folder, str(epochs)]
                command += [limit, json.dumps({"lazy_updates": True} if arguments.lazy else {})]
                log = log_of(command, in_cluster=not arguments.host)
                lines = re.findall(r"^(\w+) MiB.*?: (.*)$", log, re.MULTILINE)
                sizes = [max(json.loads(text)) for what, text in lines if what != "peak"]
                peaks = [json.loads(text) for what, text in lines if what == "peak"]
                chief = [peak.pop("chief") for peak in peaks]
                tasks = [size for peak in peaks for size in peak.values()] or chief
                cells = map(str, [*sizes, max(tasks), max(chief)])
                line = " | ".join([f"{kind}, {optimizer}, {run}", *cells])
                print(f"| {line} |", flush=True)
    return 0


def log_of(command: list[str], *, in_cluster: bool) -> str:
    """What the chief of two workers and two servers prints, or a process without a cluster."""
    if in_cluster:
        status, outputs = outputs_of_tasks(command, workers=2, ps=2)
        log = outputs["chief-0"]
    else:
        done = subprocess.run(command, capture_output=True, text=True)
        status, log = done.returncode, done.stdout + done.stderr
    if status != 0:
        raise SystemExit(f"{' '.join(command)} failed: status {status}\n{log[-3000:]}")
    return log


def measure(command: list[str]) -> tuple[float, int]:
    """(steps a second, peak memory of a server in MiB), with two workers and two servers."""
    status, outputs = outputs_of_tasks(command, workers=2, ps=2)
    log = outputs["chief-0"]
    if status != 0:
        raise SystemExit(f"{' '.join(command)} failed: status {status}\n{log[-3000:]}")
    peaks = re.findall(r"^peak MiB (\d+)$", outputs["ps-0"] + outputs["ps-1"], re.MULTILINE)
    return float(re.findall(r"steps/s ([\d.]+)", log)[-1]), max(map(int, peaks))


def measure_tables(command: list[str], strategy: str) -> float:
    """Steps a second of 26 tables, in one process or in two workers."""
    if strategy == "mirrored":
        log = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    else:
        status, outputs = outputs_of_tasks(command, workers=2)
        log = outputs["worker-0"]
        if status != 0:
            raise SystemExit(f"{' '.join(command)} failed: status {status}\n{log[-3000:]}")
    return float(re.findall(r"steps/s ([\d.]+)", log)[-1])


if __name__ == "__main__":
    raise SystemExit(main())
