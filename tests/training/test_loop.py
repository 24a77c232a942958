"""The number of steps of an execution."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from training_cases import X, Y, classifier, mirrored, strategy_of

import tfdist_ext as tfd
from tfdist_ext.training.loop import StepsPerExecutionTuner, uses_batch_hooks


def test_aims_at_the_target() -> None:
    tuner, steps, before = StepsPerExecutionTuner(), [], 0.0
    for _ in range(8):
        steps.append(tuner.steps)
        tuner.record(steps[-1], before)
        # The first time is the compiler's. Twenty milliseconds a step, so forty fit.
        before = 0.02 * steps[-1] if len(steps) > 1 else 2.0
    assert steps == [1, 1, 1, 4, 16, 40, 40, 40]


def test_a_short_rest_of_an_epoch_does_not_slow_the_next() -> None:
    tuner, steps, before = StepsPerExecutionTuner(), [], 0.0
    for left in (500, 500, 500, 500, 500, 500, 500, 3, 500, 500):
        steps.append(min(left, tuner.steps))
        tuner.record(steps[-1], before)
        before = 0.004 * steps[-1] + (0.01 if steps[-1] == 3 else 0)
    assert steps[6:] == [200, 3, 200, 200]


def test_a_stop_at_nan_needs_no_executions_of_one_step() -> None:
    stops = keras.callbacks.TerminateOnNaN()
    assert not uses_batch_hooks([stops], "train")
    model = tfd.distribute(classifier(), mirrored())
    model.fit(X * np.nan, Y, batch_size=16, epochs=3, verbose=0, callbacks=[stops])
    assert model.history.epoch == [0]


def test_a_second_fit_begins_with_the_steps_that_the_first_one_learned() -> None:
    model = tfd.distribute(classifier(), mirrored())
    model.fit(X, Y, batch_size=1, shuffle=False, verbose=0)
    program: Any = model._tfdist_ext.loop("train").program
    run, steps = program.run, []

    def counted(data: Any, n: int, *args: Any, **options: Any) -> Any:
        steps.append(n)
        return run(data, n, *args, **options)

    program.run = counted
    model.fit(X, Y, batch_size=1, shuffle=False, verbose=0)
    assert steps[0] > 1
    model.fit(X, Y, batch_size=32, shuffle=False, verbose=0)
    assert steps[-2:] == [1, 1]  # other data is learned anew


def test_variables_that_move_while_steps_run_are_refused() -> None:
    """A callback distributes another model, which shares a layer, on another strategy."""
    shared = keras.layers.Dense(4)
    other = keras.Sequential([keras.Input((4,)), shared])
    model = keras.Sequential([keras.Input((4,)), shared, keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    moves = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda *_: tfd.distribute(other, strategy_of("default"))
    )
    with pytest.raises(tfd.TrainingError, match="moved to another strategy while its steps ran"):
        tfd.distribute(model, mirrored()).fit(
            np.ones((8, 4)), np.ones((8, 1)), epochs=2, verbose=0, callbacks=[moves]
        )
