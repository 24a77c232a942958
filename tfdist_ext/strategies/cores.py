"""How many cores a process computes on, where several of one job are on one machine."""

from __future__ import annotations

import contextlib
import os

import tensorflow as tf

__all__ = ["cores_of_each", "share_cores"]


def cores_of_each(processes: int, *, cores: int, usable: int) -> int | None:
    """How many cores each of equal processes of one machine computes on; None: it may use all.

    Args:
        processes: on this machine.
        cores: that the machine has.
        usable: that this process may run on. Fewer than all are its share already.
    """
    return max(1, cores // processes) if processes > 1 and usable == cores else None


def share_cores(processes: int) -> None:
    """Let an operation use this process's share of the cores, not all, unless the user has set it.

    TensorFlow splits each large operation over as many threads as there are cores. Where several
    processes do so on the same cores, they wait for each other's threads in each operation.
    """
    cores = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    share = cores_of_each(processes, cores=cores, usable=usable)
    threads = tf.config.threading
    if share is None or "TF_NUM_INTRAOP_THREADS" in os.environ:
        return
    if not threads.get_intra_op_parallelism_threads():
        with contextlib.suppress(RuntimeError):  # TensorFlow has started
            threads.set_intra_op_parallelism_threads(share)
