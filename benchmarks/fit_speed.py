"""Compares the steps per second of `fit` with the alternatives, in one run.

    .venv/bin/python benchmarks/fit_speed.py [--rounds 3] [--markdown docs/performance.md]

Each round runs each method once, in separate processes, so that a slow minute of the machine
affects all of them. The tables show medians over the rounds. tf_keras replaces Keras, so it is
installed in a separate virtual environment (.venv-tf_keras).
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from clusters import outputs_of_tasks
from report import closing_line, put_into, table

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = Path(__file__).resolve().parent / "programs"
LEGACY = ROOT / ".venv-tf_keras"
MARKERS = ("<!-- fit_speed begin -->", "<!-- fit_speed end -->")

# name -> (workers; 0: a process without a cluster, epochs, interpreter, program and arguments).
# Epochs are so many that each is measured for about five to thirty seconds.
LEGACY_PYTHON = str(LEGACY / "bin" / "python")
CONTESTANTS: dict[str, dict[str, tuple[int, int, str, list[str]]]] = {
    "MultiWorkerMirroredStrategy, 2 processes": {
        "tfdist_ext fit": (2, 10, sys.executable, ["tfdist_fit.py", "multi_worker_mirrored"]),
        "hand-written in-graph loop": (2, 10, sys.executable, ["hand_fit.py", "multi_worker"]),
        "tf_keras fit": (2, 2, LEGACY_PYTHON, ["tf_keras_fit.py", "1"]),
        "tf_keras fit, steps_per_execution=16": (2, 3, LEGACY_PYTHON, ["tf_keras_fit.py", "16"]),
        "tf_keras fit, steps_per_execution=64": (2, 3, LEGACY_PYTHON, ["tf_keras_fit.py", "64"]),
        "tf_keras fit, steps_per_execution=448": (2, 3, LEGACY_PYTHON, ["tf_keras_fit.py", "448"]),
    },
    "MirroredStrategy, 4 logical CPUs": {
        "tfdist_ext fit": (0, 10, sys.executable, ["tfdist_fit.py", "mirrored"]),
        "hand-written in-graph loop": (0, 10, sys.executable, ["hand_fit.py", "mirrored"]),
        "Keras 3 fit": (0, 3, sys.executable, ["keras_fit.py", "1"]),
        "Keras 3 fit, steps_per_execution=64": (0, 3, sys.executable, ["keras_fit.py", "64"]),
    },
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--markdown", type=Path, help="also write the tables into this page")
    arguments = parser.parse_args()
    prepare_legacy()
    speeds: dict[tuple[str, str], list[float]] = {}
    for turn in range(arguments.rounds):
        for setting, contestants in CONTESTANTS.items():
            for name, contestant in contestants.items():
                speed = measure(*contestant)
                speeds.setdefault((setting, name), []).append(speed)
                print(f"round {turn + 1}: {setting}: {name}: {speed:.1f} steps/s", flush=True)
    text = tables(speeds, arguments.rounds)
    print(f"\n{text}")
    if arguments.markdown:
        put_into(arguments.markdown, MARKERS, text)
    return 0


def prepare_legacy() -> None:
    """A virtual environment with tf_keras and the same TensorFlow."""
    if (LEGACY / "ready").exists():
        return
    version = metadata.version("tensorflow")
    subprocess.run([sys.executable, "-m", "venv", LEGACY], check=True)
    packages = [f"tensorflow=={version}", "tf_keras", "scikit-learn"]
    subprocess.run([LEGACY / "bin" / "pip", "install", "-q", *packages], check=True)
    (LEGACY / "ready").touch()


def measure(workers: int, epochs: int, python: str, arguments: list[str]) -> float:
    """Steps a second that one contestant prints; of a cluster, its slowest task's."""
    command = [python, str(PROGRAMS / arguments[0]), *arguments[1:]]
    variables = {"TF_CPP_MIN_LOG_LEVEL": "2", "BENCHMARK_EPOCHS": str(epochs)}
    if workers == 0:
        env = {**os.environ, **variables}
        env.pop("TF_CONFIG", None)
        output = subprocess.run(
            command, env=env, check=True, timeout=600, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        ).stdout  # fmt: skip
    else:
        status, outputs = outputs_of_tasks(command, workers=workers, **variables)
        if status != 0:
            raise SystemExit(f"{' '.join(arguments)} failed: status {status}")
        output = "".join(outputs.values())
    return min(float(speed) for speed in re.findall(r"steps/s ([\d.]+)", output))


def tables(speeds: dict[tuple[str, str], list[float]], rounds: int) -> str:
    lines: list[str] = []
    for setting, contestants in CONTESTANTS.items():
        medians = {name: statistics.median(speeds[setting, name]) for name in contestants}
        lines += table(setting, medians, "tfdist_ext fit")
    return "\n".join(lines + closing_line(rounds))


if __name__ == "__main__":
    raise SystemExit(main())
