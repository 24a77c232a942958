"""Measures how long `fit` waits for a checkpoint that is written in the background or not.

    .venv/bin/python benchmarks/checkpoints.py --megabytes 1000 --rounds 5

Each round calls `fit` three times on a model with `--megabytes` of state: with
`checkpoint_async=True`, with `checkpoint_async=False`, and without checkpoints. Between the epochs,
the program copies an array of the same size, to compare the checkpoint with a plain copy.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from report import closing_line, put_into

import tfdist_ext as tfd

MARKERS = ("<!-- benchmark begin -->", "<!-- benchmark end -->")
WIDTH, EPOCHS, STEPS = 2048, 4, 30


class Clock(keras.callbacks.Callback):
    """Seconds of each epoch's steps, from its end to the next one, and of a plain copy."""

    def __init__(self, megabytes: int) -> None:
        super().__init__()
        self.steps: list[float] = []
        self.still: list[float] = []
        self.copies: list[float] = []
        self._from = [np.ones(2**23, "float32") for _ in range(megabytes // 32)]
        self._to = [np.empty_like(each) for each in self._from]
        self._ended = 0.0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        now = time.perf_counter()
        if epoch:
            self.still.append(now - self._ended)
        self._begun = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.steps.append(time.perf_counter() - self._begun)
        begun = time.perf_counter()
        for target, source in zip(self._to, self._from, strict=True):
            np.copyto(target, source)
        self.copies.append(time.perf_counter() - begun)
        self._ended = time.perf_counter()


def build(megabytes: int) -> keras.Model:
    """A model whose weights and Adam's slots are so big together."""
    layers = round(megabytes * 1e6 / (3 * 4 * WIDTH**2))
    model = keras.Sequential([keras.Input((WIDTH,))])
    for _ in range(layers):
        model.add(keras.layers.Dense(WIDTH, "relu"))
    model.compile("adam", "mse")
    return model


def fit(model: Any, megabytes: int, **options: Any) -> Clock:
    clock = Clock(megabytes)
    x = np.zeros((STEPS * 32, WIDTH), "float32")
    with tempfile.TemporaryDirectory() as folder:
        if options:
            options["checkpoint_dir"] = folder
        model.fit(x, x, batch_size=32, epochs=EPOCHS, verbose=0, callbacks=[clock], **options)
    return clock


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--markdown", type=Path, help="a page to write the table into")
    arguments = parser.parse_args()
    strategy = tfd.create_strategy("default")
    model = tfd.distribute(lambda: build(arguments.megabytes), strategy)
    fit(model, arguments.megabytes)  # which compiles
    kinds = {
        "in the background": {"checkpoint_async": True},
        "on disk before the next epoch": {"checkpoint_async": False},
    }
    rows: dict[str, list[tuple[float, float, float]]] = {name: [] for name in kinds}
    for number in range(arguments.rounds):
        plain = fit(model, arguments.megabytes)
        for name, options in kinds.items():
            clock = fit(model, arguments.megabytes, **options)
            still = statistics.median(clock.still[1:])  # the first one makes the buffers
            copy = statistics.median(clock.copies[1:])
            slowed = statistics.median(clock.steps[1:]) / statistics.median(plain.steps[1:])
            rows[name].append((still, still / copy, slowed))
            print(f"{number}: {name}: {still:.2f} s, {still / copy:.2f} copies, {slowed:.2f}")
    lines = [
        "",
        "| checkpoint | `fit` waits (s) | over a plain copy | step, over one without checkpoints |",
        "|---|---|---|---|",
    ]
    for name, found in rows.items():
        cells = [_middle([each[at] for each in found]) for at in range(3)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    text = "\n".join([*lines, *closing_line(arguments.rounds)])
    print(text)
    if arguments.markdown is not None:
        put_into(arguments.markdown, MARKERS, text)
    return 0


def _middle(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    sys.exit(main())
