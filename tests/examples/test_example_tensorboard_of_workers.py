"""docs/examples/tensorboard_of_workers.py on two real workers, one of them slow."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from event_files import scalars

from tfdist_ext.testing import run_tasks

WORKERS = ("worker-0", "worker-1")


def run_main(log_dir: str) -> str:
    """In each worker; what main() printed there."""
    import tensorboard_of_workers as example

    with contextlib.redirect_stdout(io.StringIO()) as printed:
        example.main(Path(log_dir))
    return printed.getvalue()


def one_device() -> dict[str, np.ndarray]:
    """(step, worker) -> loss and accuracy over that worker's rows, by NumPy."""
    import tensorboard_of_workers as example

    x, y = example.data()
    weights, bias = np.zeros((4, 3)), np.zeros(3)
    found: dict[str, list[list[float]]] = {"loss": [], "accuracy": []}
    for _ in range(example.EPOCHS):
        for start in range(0, len(x), example.GLOBAL_BATCH):
            of_step: dict[str, list[float]] = {name: [] for name in found}
            gradients = []
            for rows in np.split(np.arange(start, start + example.GLOBAL_BATCH), 2):
                outputs = x[rows] @ weights + bias
                p = np.exp(outputs) / np.exp(outputs).sum(axis=1, keepdims=True)
                hot = np.eye(3)[y[rows]]
                gradients.append((x[rows].T @ (p - hot) / len(rows), (p - hot).mean(axis=0)))
                of_step["loss"].append(-np.log((p * hot).sum(axis=1)).mean())
                of_step["accuracy"].append(np.mean(outputs.argmax(axis=1) == y[rows]))
            weights -= 0.5 * np.mean([g for g, _ in gradients], axis=0)
            bias -= 0.5 * np.mean([g for _, g in gradients], axis=0)
            for name, values in of_step.items():
                found[name].append(values)
    return {name: np.array(values) for name, values in found.items()}


@pytest.fixture(scope="module")
def written(four_cpus: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    log_dir = tmp_path_factory.mktemp("logs")
    return log_dir, run_tasks(run_main, {"worker": 2}, args=(str(log_dir),))


@pytest.mark.parametrize("which", ["plain", "with_tfdist_ext"])
def test_each_workers_own_numbers(written: tuple[Path, Any], which: str) -> None:
    expected = one_device()
    folder = written[0] / which
    assert sorted(path.name for path in folder.iterdir()) == list(WORKERS)
    for number, worker in enumerate(WORKERS):
        found = scalars(folder / worker)
        assert list(found["own_ms"]) == list(found["step_ms"]) == list(range(1, 41))
        for name in ("loss", "accuracy") if which == "plain" else ():
            values = expected[name][:, number]
            np.testing.assert_allclose(list(found[name].values()), values, rtol=1e-4, atol=1e-6)
    # What tells the workers apart is there to be told.
    assert np.abs(np.diff(expected["loss"], axis=1)).max() > 1e-2
    assert f"{which}: worker:1 is the slowest" in written[1]["worker:0"]
