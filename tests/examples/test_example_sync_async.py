"""docs/examples/sync_async.py: two workers against two workers and a server, one worker slow."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sync_async as example

Curves = dict[str, example.Curve]


def one_device(steps: int) -> dict[int, float]:
    """Steps -> loss of synchronous training, by NumPy: a step has 8 rows of each worker."""
    x, y = (values.astype(np.float64) for values in example.data())
    weights, losses = np.zeros((10, 1)), {}
    for step in range(steps):
        start = step * example.BATCH % (len(x) // 2)
        numbers = np.arange(start, start + example.BATCH)
        rows = np.concatenate([2 * numbers, 2 * numbers + 1])  # of worker 0, of worker 1
        gradient = 2 * x[rows].T @ (x[rows] @ weights - y[rows]) / len(rows)
        weights -= example.RATE * gradient
        losses[step + 1] = float(np.mean(np.square(x @ weights - y)))
    return losses


def check_synchronous(curve: Any) -> None:
    losses = one_device(curve[-1][1])
    for _, steps, loss in curve:
        assert loss == pytest.approx(losses[steps], rel=1e-5, abs=1e-6)


def check_asynchronous(curve: Any) -> None:
    """Stale gradients, and each example as often as its worker is quick: it learns all the same."""
    assert curve[-1][2] < 0.015  # the noise in the data alone gives 0.01
    assert curve[-1][2] < 0.01 * one_device(1)[1]


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> tuple[Curves, Path]:
    file = tmp_path_factory.mktemp("plot") / "sync_async.svg"
    return example.main(str(file)), file


def test_synchronous_steps_are_those_of_one_device(drawn: tuple[Curves, Path]) -> None:
    curve = drawn[0]["synchronous"]
    assert [steps for _, steps, _ in curve] == [20, 40, 60, 80, 100]
    check_synchronous(curve)
    # Every step waits for the slow worker.
    assert curve[-1][0] > 0.9 * 80 * example.MILLISECONDS[1] / 1000


def test_asynchronous_steps_are_more_in_the_same_time(drawn: tuple[Curves, Path]) -> None:
    curves = drawn[0]
    check_asynchronous(curves["asynchronous"])
    # The quickest of each: what else the machine does takes some of them longer.
    quickest = {
        name: min(b[0] - a[0] for a, b in itertools.pairwise(curve))
        for name, curve in curves.items()
    }
    assert 1.25 * quickest["asynchronous"] < quickest["synchronous"]


@pytest.mark.long
@pytest.mark.tfdist_cluster(worker=2, ps=1)
def test_plain_asynchronous(tfdist_cluster: Any) -> None:
    check_asynchronous(example.plain_asynchronous())  # workers and the server stay in here
    for job, index in (("worker", 0), ("worker", 1), ("ps", 0)):
        tfdist_cluster.kill(job, index)
