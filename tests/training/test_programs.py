"""How many steps an execution has."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from training_cases import strategy_of

import tfdist_ext as tfd
from tfdist_ext.training.programs import StepsPerExecutionTuner
from tfdist_ext.training.synchronous.program import SynchronousProgram


def test_aims_at_the_target() -> None:
    pace, steps, before = StepsPerExecutionTuner(target=0.4), [], 0.0
    for _ in range(8):
        steps.append(pace.next(None))
        pace.record(before)
        # The first time is the compiler's. Ten milliseconds a step, so forty fit.
        before = 0.01 * steps[-1] if len(steps) > 1 else 2.0
    assert steps == [1, 4, 1, 16, 64, 40, 40, 40]


def test_a_short_rest_of_an_epoch_does_not_slow_the_next() -> None:
    pace, steps, before = StepsPerExecutionTuner(target=0.4), [], 0.0
    for left in (500, 500, 500, 500, 500, 500, 3, 500, 500, 500):
        steps.append(pace.next(left))
        pace.record(before)
        before = 0.002 * steps[-1]
    assert steps[5:] == [200, 3, 200, 200, 200]


def test_a_second_fit_begins_where_the_first_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []
    run = SynchronousProgram.run

    def noted(self: Any, data: Any, n: int, seconds: float, **others: Any) -> Any:
        asked.append(n)
        return run(self, data, n, seconds, **others)

    monkeypatch.setattr(SynchronousProgram, "run", noted)
    x, y = np.ones((85 * 7, 3), "float32"), np.ones((85 * 7, 1), "float32")
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model = tfd.distribute(model, strategy_of("mirrored", 2))
    model.fit(x, y, batch_size=7, verbose=0)
    assert asked[:2] == [1, 4]
    asked.clear()
    model.fit(x, y, batch_size=7, verbose=0)
    assert asked[0] > 4
    asked.clear()
    model.fit(x[:70], y[:70], batch_size=35, verbose=0)  # of another size nothing is known
    assert asked[0] == 1
