"""One trial of a kill while a checkpoint is written in the background: the one before loads.

This process imports TensorFlow and never starts it, so that each trial is a fork of it.
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
import warnings
from pathlib import Path

import keras
import numpy as np

import tfdist_ext as tfd
from tfdist_ext.training.checkpoints.folder import CheckpointFolder

UNITS = 1500  # 27 MB of state with Adam's slots
LIMIT = 60.0  # seconds until the first checkpoint is there


def killed(seed: int, number: int) -> tuple[bool, int, str]:
    """(a file was being written, steps of the newest checkpoint, what is wrong; "" for nothing)."""
    with tempfile.TemporaryDirectory(prefix="trial-") as name:
        folder = Path(name) / "checkpoints"
        child = os.fork()
        if not child:
            try:
                _train(folder)
            finally:
                os._exit(1)  # it must not do what its parent has to do
        try:
            seen = _wait_for_checkpoint(folder)
            time.sleep(random.Random(f"{seed} {number}").uniform(0.0, 0.5))
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        writing = any(folder.glob(".epoch-*.unfinished"))
        with warnings.catch_warnings(record=True) as faults:
            found = CheckpointFolder(str(folder))
            try:
                found.open()
            except tfd.TrainingError as error:
                return writing, 0, str(error)
        step = found.progress.step
        if step < seen:
            return writing, step, f"step {step}, where {seen} was saved"
        return writing, step, "; ".join(str(fault.message) for fault in faults)


def _train(folder: Path) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    layers = [keras.Input((UNITS,)), keras.layers.Dense(UNITS), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile("adam", "mse")
    x = np.ones((64, UNITS), "float32")
    ours = tfd.distribute(model, tfd.create_strategy("default"))
    ours.fit(
        x, x[:, :1], batch_size=1, epochs=1000, verbose=0,
        checkpoint_dir=folder, checkpoint_every=1,
    )  # fmt: skip


def _wait_for_checkpoint(folder: Path) -> int:
    """The steps of a checkpoint that is there."""
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline:
        if files := tfd.finished_checkpoints(folder):
            epoch, _, batches = files[-1].stem.partition("-batch-")
            return 64 * int(epoch.removeprefix("epoch-")) + int(batches or 0)
        time.sleep(0.01)
    raise SystemExit(f"no checkpoint in {folder} after {LIMIT:.0f} s")
