"""The example mirrored_variables: copies on all devices, equal to the bit, and right."""

from __future__ import annotations

from typing import Any

import mirrored_variables as example
import numpy as np
import pytest

import tfdist_ext as tfd


def mirrored(replicas: int) -> Any:
    return tfd.create_strategy("mirrored", devices=[f"CPU:{n}" for n in range(replicas)])


def on_one_device(batch_size: int) -> dict[str, Any]:
    x, y = example.data()
    weight, mean = np.zeros(3), np.zeros(3)
    for start in range(0, len(x), batch_size):
        rows, wanted = x[start : start + batch_size], y[start : start + batch_size]
        weight -= example.RATE * 2 * rows.T @ (rows @ weight - wanted) / len(rows)
        mean = example.MOMENTUM * mean + (1 - example.MOMENTUM) * rows.mean(axis=0)
    return {"weight": weight, "mean": mean, "rows": len(x)}


@pytest.mark.tfdist_logical_cpus(4)
@pytest.mark.parametrize(("replicas", "batch_size"), [(2, 8), (3, 5)])
def test_copies_are_equal_and_those_of_one_device(replicas: int, batch_size: int) -> None:
    """17 rows: parts of unequal size, and replicas without a row in the last batch."""
    expected = on_one_device(batch_size)
    plain = example.plain(mirrored(replicas), batch_size)
    ours = example.with_tfdist_ext(mirrored(replicas), batch_size)
    assert set(plain) == {"weight", "mean", "rows"}
    assert set(ours) == {"weight", "mean"}
    for found in (plain, ours):
        for name, by_device in found.items():
            assert [device[-5:] for device in by_device] == [f"CPU:{n}" for n in range(replicas)]
            first, *others = by_device.values()
            for other in others:
                np.testing.assert_array_equal(other, first)
            np.testing.assert_allclose(first, expected[name], atol=1e-6)
