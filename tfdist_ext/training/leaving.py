"""Workers leave together: one whose script ends early waits for the others.

Where a worker's process is gone, TensorFlow reports to the others, within ten seconds, that their
peer has crashed, and each of their collectives fails from then on. So the first ones to finish
wait at exit, for a limited time: the others may never come to their end.
"""

from __future__ import annotations

import atexit
import contextlib
import sys
import threading

import tensorflow as tf

__all__ = ["leave_together"]

LIMIT = 30.0  # seconds

_registered = False


def leave_together(strategy: tf.distribute.Strategy) -> None:
    """Let this worker's process wait for the others when it exits; every worker must call.

    After an error nothing is waited for: the others are to learn of it.
    """
    global _registered
    if _registered:
        return
    _registered = True

    def in_replica() -> tf.Tensor:
        context = tf.distribute.get_replica_context()
        return context.all_reduce(tf.distribute.ReduceOp.SUM, tf.ones([], tf.int32))

    # A function of its own, so that it is not taken for another collective that is still to come.
    meet = tf.function(lambda: strategy.run(in_replica), autograph=False).get_concrete_function()
    leaving, all_left = threading.Event(), threading.Event()

    def wait_for_others() -> None:
        leaving.wait()
        with contextlib.suppress(tf.errors.OpError):  # another worker has crashed, and said so
            meet()
        all_left.set()

    # In a thread, so that Ctrl-C works meanwhile; made now, as none can be made at exit.
    threading.Thread(target=wait_for_others, daemon=True, name="leave-together").start()

    @atexit.register
    def leave() -> None:
        if not hasattr(sys, "last_type"):  # no error has ended the script
            leaving.set()
            all_left.wait(LIMIT)
