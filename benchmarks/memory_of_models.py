"""Measures the memory that models leave behind, with plain Keras and tfdist_ext.

    .venv/bin/python benchmarks/memory_of_models.py

One process creates, trains and deletes small models one after another, each for one epoch. The
figure is the growth of the process per model, after the first five models.
"""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
from pathlib import Path

FIRST = 5  # after these, what is made once is there
CONTESTANTS = {"keras": "plain Keras, one device", "tfdist_ext": "tfd.distribute, two replicas"}


def resident() -> float:
    """MB of this process in memory (Linux)."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE") / 1e6


def grown(contestant: str, models: int) -> float:
    """MB for each model."""
    import tfdist_ext as tfd

    strategy = tfd.create_strategy("mirrored", logical_cpus=2)
    import keras
    import numpy as np

    x = np.random.default_rng(0).normal(size=(64, 20)).astype("float32")

    def build() -> keras.Model:
        layers = [keras.Input((20,)), keras.layers.Dense(32, "relu"), keras.layers.Dense(1)]
        model = keras.Sequential(layers)
        model.compile("adam", "mse", jit_compile=False)
        return model

    before = 0.0
    for number in range(models):
        if number == FIRST:
            before = resident()
        model = build() if contestant == "keras" else tfd.distribute(build, strategy)
        model.fit(x, x[:, :1], batch_size=16, verbose=0)
        model = None
        gc.collect()
    return (resident() - before) / (models - FIRST)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=int, default=30)
    parser.add_argument("--only", choices=CONTESTANTS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only:
        print(f"{grown(arguments.only, arguments.models):.1f}")
        return
    print(f"| {arguments.models} models made, trained and deleted | MB kept of each |\n|---|---|")
    for contestant, name in CONTESTANTS.items():
        command = [sys.executable, __file__, "--models", str(arguments.models)]
        out = subprocess.check_output([*command, "--only", contestant], text=True)
        print(f"| {name} | {out.split()[-1]} |", flush=True)


if __name__ == "__main__":
    main()
