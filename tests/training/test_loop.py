"""The number of steps of an execution."""

from __future__ import annotations

from typing import Any

from training_cases import X, Y, classifier, mirrored

import tfdist_ext as tfd
from tfdist_ext.training.loop import StepsPerExecutionTuner


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
