"""How many steps an execution has."""

from __future__ import annotations

from tfdist_ext.training.programs import StepsPerExecutionTuner


def test_aims_at_the_target() -> None:
    tuner, steps, before = StepsPerExecutionTuner(), [], 0.0
    for _ in range(8):
        steps.append(tuner.next(None))
        tuner.record(steps[-1], before)
        # The first time is the compiler's. Twenty milliseconds a step, so forty fit.
        before = 0.02 * steps[-1] if len(steps) > 1 else 2.0
    assert steps == [1, 1, 1, 4, 16, 40, 40, 40]


def test_a_short_rest_of_an_epoch_does_not_slow_the_next() -> None:
    tuner, steps, before = StepsPerExecutionTuner(), [], 0.0
    for left in (500, 500, 500, 500, 500, 500, 500, 3, 500, 500):
        steps.append(tuner.next(left))
        tuner.record(steps[-1], before)
        before = 0.004 * steps[-1] + (0.01 if steps[-1] == 3 else 0)
    assert steps[6:] == [200, 3, 200, 200]
