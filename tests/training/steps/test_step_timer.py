"""The time that a task waits for the others, which is no part of its own time."""

from __future__ import annotations

import time

import tensorflow as tf

from tfdist_ext.training.steps.step_timer import ReplicaTimer


def test_a_wait_inside_of_another_wait_counts_once() -> None:
    """The sum of sparse gradients asks for the numbers of slices first."""
    timer = ReplicaTimer()

    def slow(value: tf.Tensor) -> tf.Tensor:
        time.sleep(0.2)
        return value

    timer.synchronize(lambda value: timer.synchronize(slow, value), tf.constant(1.0))
    end = tf.timestamp()
    assert 0.2 <= float(timer.waited()) < 0.4
    assert float(end - timer.ready(tf.constant(1.0))) >= 0.2
