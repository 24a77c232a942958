"""The example custom_strategy: data, run and reduce of a strategy of one's own, in two ways."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import custom_strategy as example
import numpy as np
import pytest

DEVICES = ["CPU:0", "CPU:1", "CPU:2"]


@pytest.fixture(scope="module")
def one_device() -> Any:
    """NumPy's gradient descent on the same batches of 8, 8 and 4 rows."""
    x, y = example.data()
    weight = np.zeros(3)
    for _ in range(3):
        for start in range(0, len(x), 8):
            rows, wanted = x[start : start + 8], y[start : start + 8]
            weight -= example.RATE * 2 * rows.T @ (rows @ weight - wanted) / len(rows)
    return weight


@pytest.mark.tfdist_logical_cpus(4)
@pytest.mark.parametrize(
    "train", [example.plain, example.with_tfdist_ext, example.fit_with_tfdist_ext]
)
def test_weights_of_one_device(train: Callable[..., Any], one_device: Any) -> None:
    np.testing.assert_allclose(train(DEVICES), one_device, atol=1e-6)
