"""Whole values of variables, whatever a strategy makes of them."""

from __future__ import annotations

import types

import keras
import numpy as np
import pytest
from training_cases import strategy_of

from tfdist_ext.errors import PeerError
from tfdist_ext.training import state
from tfdist_ext.training.state import assign_whole, whole_slots, whole_value
from tfdist_ext.training.variables import SHARDED, ShardedSlot

DTYPES = ["float16", "bfloat16", "float32", "float64", "int8", "uint32", "int64", "bool"]


def test_a_failure_while_slots_are_gathered_leaves_parts() -> None:
    """Of two slots, each of one worker's half of 4 numbers."""

    class LosesAPeer:
        worker, is_chief, calls = 0, True, 0

        def sum_over_workers(self, value: np.ndarray) -> np.ndarray:
            self.calls += 1
            if self.calls == 2:
                raise PeerError("worker 1 is gone")
            return value

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(), "mse")
    halves = [keras.Variable([1.0, 2.0]) for _ in range(2)]
    slots = [ShardedSlot(half, (4,), [(0, 0, 2), (1, 2, 4)]) for half in halves]
    vars(model.optimizer)[SHARDED] = types.SimpleNamespace(slots=slots)
    with pytest.raises(PeerError), whole_slots(LosesAPeer(), model):  # type: ignore[arg-type]
        pass
    assert [half.shape for half in halves] == [(2,), (2,)]
    assert [half.numpy().tolist() for half in halves] == [[1.0, 2.0]] * 2


@pytest.mark.parametrize("name", ["mirrored", "central_storage"])
def test_whole_values_of_every_dtype(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "BLOCK_BYTES", 24)
    strategy = strategy_of(name)
    for dtype in DTYPES:
        for shape in ((10, 3), (7,), (), (0, 3)):
            with strategy.scope():
                variable = keras.Variable(np.zeros(shape), dtype=dtype, trainable=False)
            value = np.arange(np.prod(shape)).reshape(shape).astype(whole_value(variable).dtype)
            assign_whole(variable, value)
            np.testing.assert_array_equal(whole_value(variable), value)
            for copy in strategy.experimental_local_results(variable.value):
                np.testing.assert_array_equal(copy.read_value().numpy(), value)
            copied = whole_value(variable)
            assign_whole(variable, np.zeros(shape))
            np.testing.assert_array_equal(copied, value)
