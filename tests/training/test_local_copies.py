"""What an optimizer reads in a replica's step, and how often."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist_ext.training import _keras_private as kp
from tfdist_ext.training.variables import LocalCopies

SIZES = (1, 2, 3)


def optimized(options: dict[str, Any]) -> tuple[keras.optimizers.Optimizer, list[keras.Variable]]:
    variables = [keras.Variable(np.ones(size, "float32")) for size in SIZES]
    optimizer = keras.optimizers.Adam(**options)
    optimizer.build(variables)
    return optimizer, variables


def reads(function: Any, variable: keras.Variable) -> int:
    """How often the graph of a function reads a variable."""
    graph = function.get_concrete_function().graph
    (handle,) = [inner for outer, inner in graph.captures if outer is variable.value.handle]
    read = [each for each in graph.get_operations() if each.type == "ReadVariableOp"]
    return sum(each.inputs[0] is handle for each in read)


@pytest.mark.parametrize(
    "options",
    [
        {"learning_rate": 0.1},
        {"learning_rate": keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)},
        {"learning_rate": 0.1, "use_ema": True},
        {"learning_rate": 0.1, "gradient_accumulation_steps": 2},  # in a cond
    ],
    ids=["plain", "schedule", "averaged", "accumulated"],
)
def test_the_number_of_the_step_is_read_once(options: dict[str, Any]) -> None:
    optimizer, variables = optimized(options)
    plain, expected = optimized(options)
    gradients = [tf.range(1.0, size + 1) for size in SIZES]

    @tf.function(autograph=False)
    def step() -> None:
        with LocalCopies(kp.raw_value, [optimizer]):
            optimizer.apply(gradients, variables)

    for _ in range(5):
        step()
        plain.apply(gradients, expected)
    found = optimizer.variables + variables
    for mine, value in zip(found, plain.variables + expected, strict=True):
        np.testing.assert_allclose(mine.numpy(), value.numpy(), rtol=1e-6, err_msg=mine.path)
    counter, rate = kp.step_variables(optimizer)
    if "gradient_accumulation_steps" not in options:
        assert reads(step, counter) == 1
        assert rate is None or reads(step, rate) == 1


@pytest.mark.parametrize("eager", [False, True])
def test_an_assignment_is_seen(eager: bool) -> None:
    optimizer, _ = optimized({})
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
