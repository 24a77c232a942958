"""Whole values of variables, whatever a strategy makes of them."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from training_cases import strategy_of

from tfdist_ext.training import state
from tfdist_ext.training.state import assign_whole, whole_value

DTYPES = ["float16", "bfloat16", "float32", "float64", "int8", "uint32", "int64", "bool"]


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
