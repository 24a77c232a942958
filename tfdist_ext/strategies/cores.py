"""How many cores a process computes on, where several of one job are on one machine."""

from __future__ import annotations

import contextlib
import os

import tensorflow as tf

__all__ = ["share_cores"]


def share_cores(processes: int) -> None:
    """Let an operation use this process's share of the cores, not all, unless the user has set it.

    TensorFlow splits each large operation over as many threads as there are cores. If several
    processes do so on the same cores, they wait for each other's threads in each operation. A
    process that may not run on all cores has its share already.

    Args:
        processes: of this job on this machine.
    """
    cores = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    if processes < 2 or usable < cores or "TF_NUM_INTRAOP_THREADS" in os.environ:
        return
    threads = tf.config.threading
    if not threads.get_intra_op_parallelism_threads():
        with contextlib.suppress(RuntimeError):  # TensorFlow has started
            threads.set_intra_op_parallelism_threads(max(1, cores // processes))
