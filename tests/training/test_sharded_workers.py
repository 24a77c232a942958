"""One order of record files on 1, 2 and 4 real workers, and after a worker was killed."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tfdist_ext.launch import addresses_needed, plan_local, reserve_ports, run_plan

PROGRAM = Path(__file__).parents[1] / "programs" / "sharded_workers.py"
EXAMPLES, WIDTH, EPOCHS = 500, 256, 3
RECORD = (WIDTH + 1) * 4 + 16


@pytest.fixture(scope="module")
def pattern(tmp_path_factory: pytest.TempPathFactory) -> str:
    import tensorflow as tf

    folder = tmp_path_factory.mktemp("records")
    random = np.random.default_rng(0)
    x = random.normal(size=(EXAMPLES, WIDTH)).astype("float32")
    rows = np.concatenate([x, np.sin(x[:, :4].sum(axis=1, keepdims=True))], axis=1)
    for number, part in enumerate(np.array_split(rows.astype("float32"), 3)):
        with tf.io.TFRecordWriter(str(folder / f"part-{number}.tfrecord")) as writer:
            for row in part:
                writer.write(row.tobytes())
    return str(folder / "*.tfrecord")


@pytest.fixture(scope="module")
def train(pattern: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    def run(workers: int, folder: Path | None = None, kill_at: int = 0) -> Any:
        folder = folder or tmp_path_factory.mktemp("checkpoints")
        logs = tmp_path_factory.mktemp("logs")
        command = [sys.executable, str(PROGRAM), pattern, str(folder), str(kill_at)]
        env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"}
        with (
            open(os.devnull, "w") as nowhere,
            reserve_ports(addresses_needed(workers=workers)) as ports,
        ):
            plan = plan_local(command, workers=workers, ports=ports, log_dir=str(logs), env=env)
            result = run_plan(plan, env=env, stream=nowhere, timeout=150, grace=1)
        texts = [(logs / f"worker-{i}.log").read_text() for i in range(workers)]
        assert (result.exit_status == 0) == (kill_at == 0), texts[0][-3000:]
        if kill_at:
            return None
        return [json.loads(text.rsplit("RESULT ", 1)[1].splitlines()[0]) for text in texts]

    return run


@pytest.fixture(scope="module")
def results(train: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    def broken_off() -> Any:
        folder = tmp_path_factory.mktemp("broken_off")
        train(3, folder, kill_at=18)  # in the second epoch of 11 steps, between two checkpoints
        return train(2, folder)

    with ThreadPoolExecutor(2) as pool:
        running = {str(n): pool.submit(train, n) for n in (1, 2, 4)}
        running["broken off"] = pool.submit(broken_off)
        return {name: future.result() for name, future in running.items()}


def test_one_loss_curve_for_every_number_of_workers(results: dict[str, Any]) -> None:
    expected = results["1"][0]["losses"]
    assert list(map(int, expected)) == list(range(1, 11 * EPOCHS + 1))
    for name, tasks in results.items():
        for task in tasks:
            steps = list(task["losses"])
            assert len(steps) == (33 if name != "broken off" else 33 - 16)
            found = [task["losses"][step] for step in steps]
            np.testing.assert_allclose(found, [expected[step] for step in steps], rtol=2e-5)


def test_weights_are_those_of_one_worker(results: dict[str, Any]) -> None:
    expected = results["1"][0]["weights"]
    for tasks in results.values():
        for task in tasks:
            assert task["place"] == [EPOCHS, 0]
            for found, wanted in zip(task["weights"], expected, strict=True):
                np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-6)


def test_each_worker_reads_its_own_records_only(results: dict[str, Any]) -> None:
    """But for what is read ahead, and thrown away at the end."""
    whole = EXAMPLES * EPOCHS * RECORD
    for workers in (1, 2, 4):
        for task in results[str(workers)]:
            assert whole / workers * 0.98 < task["bytes"] < whole / workers * 1.6
