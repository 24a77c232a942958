"""The time that a task waits for the others, which is no part of its own time."""

from __future__ import annotations

import time

import tensorflow as tf

from tfdist_ext.training.steps.step_timer import Waits


def test_a_wait_inside_of_another_wait_counts_once() -> None:
    """The sum of sparse gradients asks for the numbers of slices first."""
    waits = Waits()

    def slow(value: tf.Tensor) -> tf.Tensor:
        time.sleep(0.2)
        return value

    waits.synchronize(lambda value: waits.synchronize(slow, value), tf.constant(1.0))
    assert 0.2 <= float(waits.seconds()) < 0.4
    ready = waits.ready(tf.constant(1.0))
    assert float(tf.timestamp() - ready) >= 0.2
