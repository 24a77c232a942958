"""One order of record files, and data of each worker's own, on real workers; and after a kill."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from training_cases import strategy_of
from warm_programs import run_together

import tfdist_ext as tfd
from tfdist_ext.launcher.plan import local_plan

PROGRAMS = Path(__file__).parents[1] / "programs"
sys.path.insert(0, str(PROGRAMS))
import sharded_case as case  # noqa: E402


@pytest.fixture(scope="module")
def pattern(tmp_path_factory: pytest.TempPathFactory) -> str:
    return case.write(tmp_path_factory.mktemp("records"))


@pytest.fixture(scope="module")
def one(pattern: str) -> Any:
    """One process: its loss at each step, and its weights at the end."""
    model = tfd.distribute(case.build, strategy_of("default"))
    data = tfd.data.from_tfrecords(pattern, case.parse, global_batch_size=case.BATCH, seed=11)
    curve = case.Curve()
    model.fit(data, epochs=case.EPOCHS, callbacks=[curve], verbose=0)
    return curve.losses, model.keras_model.get_weights()


def train(
    pattern: str, workers: int, folder: Path, kill_at: int = 0, *, shares: bool = False
) -> Any:
    """What each of the workers has to say; None where one was killed."""
    command = [sys.executable, str(PROGRAMS / "sharded_workers.py")]
    command += [pattern, str(folder / "checkpoints"), str(kill_at), str(int(shares))]
    logs = folder / f"logs of {workers}"
    logs.mkdir()
    with local_plan(command, workers=workers, env=os.environ) as plan:
        statuses, texts = run_together(plan, logs, os.environ, timeout=150)
    texts = {name: text for name, text in texts.items() if name.startswith("worker:")}
    ended_well = all(statuses[name] == 0 for name in texts)
    assert ended_well == (kill_at == 0), "\n".join(texts.values())[-3000:]
    if kill_at:
        return None
    return [json.loads(text.rsplit("RESULT ", 1)[1].splitlines()[0]) for text in texts.values()]


@pytest.fixture(scope="module")
def results(pattern: str, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Of two workers."""
    return train(pattern, 2, tmp_path_factory.mktemp("workers"))


def assert_one_training(tasks: list[dict[str, Any]], one: Any, first_step: int) -> None:
    """Losses at each step and weights at the end, as of one process."""
    expected, weights = one
    assert list(expected) == list(range(1, case.STEPS * case.EPOCHS + 1))
    for task in tasks:
        steps = [int(step) for step in task["losses"]]
        assert steps == list(range(first_step, 34))
        found = list(task["losses"].values())
        np.testing.assert_allclose(found, [expected[step] for step in steps], rtol=2e-5)
        assert task["place"] == [case.EPOCHS, 0]
        for found, wanted in zip(task["weights"], weights, strict=True):
            # Sums of parts round differently than sums of whole batches: 33 steps, any processor.
            np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-6)


def test_losses_and_weights_are_those_of_one_process(
    results: list[dict[str, Any]], one: Any
) -> None:
    assert_one_training(results, one, first_step=1)


@pytest.mark.parametrize("shares", [pytest.param(False, marks=pytest.mark.long), True])
def test_three_workers_resume_what_two_began(
    pattern: str, one: Any, tmp_path: Path, shares: bool
) -> None:
    """Also where workers share the optimizer, and each has another part of it afterwards."""
    # In the second epoch, between two checkpoints.
    train(pattern, 2, tmp_path, kill_at=18, shares=shares)
    assert_one_training(train(pattern, 3, tmp_path, shares=shares), one, first_step=16)


def test_each_worker_reads_its_own_records_only(results: list[dict[str, Any]]) -> None:
    """But for what is read ahead, and thrown away at the end."""
    whole = case.EXAMPLES * case.EPOCHS * case.RECORD
    for task in results:
        assert whole / 2 * 0.98 < task["bytes"] < whole / 2 * 1.6


@pytest.fixture(scope="module")
def of_all_tasks(four_cpus: None) -> tuple[list[np.ndarray], list[float], list[float]]:
    """One process on the global batches: its weights, the error of each epoch, and of a test."""
    model = case.build()
    model.run_eagerly = True  # few small steps take less time than making a graph of one
    errors = []
    for epoch in range(2):
        global_batches = case.of_all_tasks(epoch)
        of_batches = []
        for x, y in global_batches:
            model.reset_metrics()  # which Keras does by itself since 3.15
            of_batches.append(model.train_on_batch(x, y, return_dict=True)["mae"])
        errors.append(np.average(of_batches, weights=[len(x) for x, _ in global_batches]))
    batches = case.of_all_tasks(0)
    x, y = (np.concatenate([batch[i] for batch in batches]) for i in range(2))
    return model.get_weights(), errors, model.evaluate(x, y, verbose=0)


@pytest.mark.parametrize("kind", ["by_function", "moved"])
def test_workers_with_other_numbers_of_batches(
    kind: str, results: list[dict[str, Any]], of_all_tasks: Any
) -> None:
    """As one process on the global batches: the rows that each worker has at that step."""
    trained, errors, evaluated = of_all_tasks
    for task in results:
        found = task[kind]
        assert found["place"] == [2, 0]
        for weights, wanted in zip(found["weights"], trained, strict=True):
            np.testing.assert_allclose(weights, wanted, rtol=0, atol=1e-6)
        np.testing.assert_allclose(found["history"]["mae"], errors, rtol=1e-5)
        np.testing.assert_allclose(found["evaluate"], evaluated, rtol=1e-5)


def test_predictions_of_workers_data_have_no_order(results: list[dict[str, Any]]) -> None:
    for task in results:
        assert "`predict` cannot use from_dataset_fn on several workers" in task["predict"]


def test_endless_and_finite_shards_are_refused(results: list[dict[str, Any]]) -> None:
    for task in results:
        assert "The data of shard 1 ends, but the data of shard 0 does not" in task["endless"]


def test_workers_that_do_not_agree_on_their_data(results: list[dict[str, Any]]) -> None:
    for task in results:
        seed, position, rows = task["refused"]
        assert "seed in the data's state must be the same on all workers, but is 0 on" in seed
        assert "examples in the data's state must be" in position
        assert "and 0 on worker 1" in position
        assert "fingerprint in the data's state" in rows
