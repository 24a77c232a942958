"""The model of the embedding benchmark: one row of a table per example, and a Dense.

Each program runs as all tasks of a parameter server cluster. Arguments: rows of the table, steps of
an epoch, epochs, and for tfdist_ext's own the optimizer (default "sgd"), and "lazy" for lazy
updates.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable

import numpy as np
import serving
import tensorflow as tf
from own_memory import mebibytes

__all__ = [
    "BATCH",
    "LAZY",
    "OPTIMIZER",
    "ROWS",
    "STEPS",
    "WIDTH",
    "data",
    "dataset",
    "report_speed",
    "serve",
]

BATCH = 256
WIDTH = 32
ROWS, STEPS, EPOCHS = (int(argument) for argument in sys.argv[1:4])
OPTIMIZER = sys.argv[4] if len(sys.argv) > 4 else "sgd"
LAZY = sys.argv[5:] == ["lazy"]


def serve() -> None:
    """Serve in a task that is not the chief; a parameter server reports its peak memory."""
    if json.loads(os.environ["TF_CONFIG"])["task"]["type"] == "ps":
        threading.Thread(target=report_peak, daemon=True).start()
    serving.serve()


def report_peak() -> None:
    peak = 0
    while True:
        time.sleep(0.5)
        now = int(mebibytes("VmHWM"))
        if now > peak:
            print(f"peak MiB {now}", flush=True)
        peak = now


def data() -> tuple[np.ndarray, np.ndarray]:
    """(ids, targets) of one epoch."""
    random = np.random.default_rng(0)
    ids = random.integers(0, ROWS, BATCH * STEPS)
    return ids, random.normal(size=(BATCH * STEPS, 1)).astype("float32")


def dataset() -> tf.data.Dataset:
    """Batches without end, for programs that read on the workers."""
    examples = tf.data.Dataset.from_tensor_slices(data())
    return examples.shuffle(BATCH * STEPS).repeat().batch(BATCH).prefetch(tf.data.AUTOTUNE)


def report_speed(run_epochs: Callable[[int], object]) -> None:
    """Print steps a second of whole epochs, after one that compiles."""
    run_epochs(1)
    started = time.perf_counter()
    run_epochs(EPOCHS)
    print(f"steps/s {EPOCHS * STEPS / (time.perf_counter() - started):.1f}", flush=True)
