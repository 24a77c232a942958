"""Losses of rows, state written in inner graphs and shuffled batches on two real workers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "programs"))


def test_workers_train_as_one_device(run_cluster: Callable[..., list[Any]]) -> None:
    import exact_workers

    import tfdist_ext as tfd

    workers = run_cluster("exact_workers.py", workers=2, timeout=100)
    expected = exact_workers.trained(tfd.create_strategy("default"), seed=7)
    for worker in workers:
        for name, values in expected.items():
            for mine, wanted in zip(worker[name], values, strict=True):
                np.testing.assert_allclose(mine, wanted, rtol=1e-5, atol=2e-6, err_msg=name)
    assert workers[0] == workers[1]
