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


@pytest.fixture(scope="module")
def written(four_cpus: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    log_dir = tmp_path_factory.mktemp("logs")
    return log_dir, run_tasks(run_main, {"worker": 2}, args=(str(log_dir),))


@pytest.mark.parametrize("which", ["plain", "with_tfdist_ext"])
def test_each_workers_own_numbers(written: tuple[Path, Any], which: str) -> None:
    folder = written[0] / which
    assert sorted(path.name for path in folder.iterdir()) == list(WORKERS)
    found = [scalars(folder / worker) for worker in WORKERS]
    for of_worker in found:
        assert list(of_worker["own_ms"]) == list(of_worker["step_ms"]) == list(range(1, 41))
    if which == "plain":  # the loss of each worker's own rows
        losses = [np.array(list(of_worker["loss"].values())) for of_worker in found]
        assert np.abs(losses[0] - losses[1]).max() > 1e-2
    assert f"{which}: worker:1 is the slowest" in written[1]["worker:0"]
