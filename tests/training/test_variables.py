"""What an optimizer reads in a replica's step, and how often."""

from __future__ import annotations

import keras
import pytest
import tensorflow as tf

from tfdist_ext.training import _keras_private as kp
from tfdist_ext.training.variables import LocalCopies


@pytest.mark.parametrize("eager", [False, True])
def test_an_assignment_is_seen(eager: bool) -> None:
    optimizer = keras.optimizers.Adam()
    optimizer.build([keras.Variable(1.0)])
    counter = optimizer.iterations

    def step() -> list[tf.Tensor]:
        def more() -> tf.Tensor:
            counter.assign_add(10)
            return tf.identity(counter)

        with LocalCopies(kp.raw_value, [optimizer]):
            seen = [tf.identity(counter)]
            counter.assign_add(1)
            seen.append(tf.identity(counter))
            seen.append(tf.cond(seen[0] < 5, more, lambda: tf.identity(counter)))
            return [*seen, tf.identity(counter)]

    call = step if eager else tf.function(step, autograph=False)
    assert [int(value) for value in call()] == [0, 1, 11, 11]
    assert [int(value) for value in call()] == [11, 12, 12, 12]
