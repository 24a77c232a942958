"""Training by three real processes; every number against one process's."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from task_programs import results_of

PROGRAMS = Path(__file__).parents[1] / "programs"
sys.path.insert(0, str(PROGRAMS))


class Cluster:
    """What the workers reported, and the directory they shared."""

    def __init__(self, workers: list[dict[str, Any]], shared: Path):
        self.workers = workers
        self.shared = shared

    def same(self, key: str) -> Any:
        """The value of a key, after checking that all workers agree to the last bit."""
        first, *others = [worker[key] for worker in self.workers]
        assert all(other == first for other in others), key
        return first


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    shared = tmp_path_factory.mktemp("shared")
    return Cluster(results_of("train_workers.py", str(shared), cluster=3, timeout=200), shared)


@pytest.fixture(scope="module")
def one_process() -> dict[str, Any]:
    """The first part of the program, on one device."""
    import keras
    import mlp

    import tfdist_ext as tfd

    x, y = mlp.data()
    keras.utils.set_random_seed(7)
    model = tfd.distribute(mlp.build, tfd.create_strategy("default"))
    validation = (x[:48], y[:48])
    history = model.fit(x, y, batch_size=mlp.BATCH, epochs=3, validation_data=validation, verbose=0)
    return {
        "history": history.history,
        "weights": mlp.flat(model.keras_model),
        "evaluate": model.evaluate(x, y, batch_size=mlp.BATCH, verbose=0),
        "predict": model.predict(x[:50], batch_size=mlp.BATCH, verbose=0),
    }


def test_every_worker_ends_with_the_same_bits(cluster: Cluster) -> None:
    assert cluster.same("replicas") == len(cluster.workers)
    for key in ("bits", "mixed_bits", "bits_saved", "named_bits", "history", "evaluate", "predict"):
        cluster.same(key)


def test_weights_are_those_of_one_process(cluster: Cluster, one_process: dict[str, Any]) -> None:
    np.testing.assert_allclose(cluster.same("weights"), one_process["weights"], atol=1e-6)
    np.testing.assert_allclose(cluster.same("weights_by_xla"), one_process["weights"], atol=1e-6)
    for key in ("weights_in_buckets0", "weights_in_buckets1"):
        np.testing.assert_allclose(cluster.same(key), one_process["weights"], atol=1e-6)
    assert min(cluster.same("collectives")) > 5
    by_xla = "train: a trace for the one replica of this task, compiled by XLA"
    assert cluster.same("steps_by_xla") == [by_xla]


def test_history_evaluate_and_predict_are_those_of_one_process(
    cluster: Cluster, one_process: dict[str, Any]
) -> None:
    history = cluster.same("history")
    assert list(history) == list(one_process["history"])
    for name, values in one_process["history"].items():
        np.testing.assert_allclose(history[name], values, rtol=1e-5, err_msg=name)
    np.testing.assert_allclose(cluster.same("evaluate"), one_process["evaluate"], rtol=1e-5)
    np.testing.assert_allclose(cluster.same("predict"), one_process["predict"], atol=1e-5)


def test_all_wait_for_what_the_chief_saves_and_plain_keras_loads_it(cluster: Cluster) -> None:
    import keras
    import mlp

    written = sorted(path.name for path in cluster.shared.iterdir())
    files = ["in_callback.keras", "in_callback.weights.h5", "model.keras"]
    assert written == files  # the other workers wrote nothing
    assert cluster.same("saved_when_save_returns") is True
    model = keras.models.load_model(cluster.shared / "model.keras")
    assert mlp.fingerprint(model) == cluster.same("bits_saved")


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of Keras
def test_calls_in_callbacks_are_those_of_one_process(cluster: Cluster, tmp_path: Path) -> None:
    import keras
    import mlp

    keras.utils.set_random_seed(7)
    expected = mlp.trained_in_callbacks(mlp.build(), tmp_path)
    results = cluster.same("in_callbacks")
    for name, values in expected.items():
        np.testing.assert_allclose(results[name], values, rtol=1e-5, atol=1e-6, err_msg=name)
    saved = keras.models.load_model(cluster.shared / "in_callback.keras")
    np.testing.assert_allclose(mlp.flat(saved), expected["loaded"], atol=1e-6)


def test_one_workers_stop_stops_all_at_the_same_step(cluster: Cluster) -> None:
    assert cluster.same("steps_until_one_stopped") == 3
    assert cluster.same("stopped_before") == 8 + 1  # as Keras, which still runs one batch
    assert cluster.same("rows_predicted") == 2 * 24


def test_an_existing_models_weights_are_the_chiefs(cluster: Cluster) -> None:
    assert cluster.same("adopted_bits") == cluster.workers[0]["chiefs_own"]


def test_data_of_unknown_length_ends_for_all_together(cluster: Cluster) -> None:
    assert cluster.same("unknown_length_steps") == 2 * 3
    accuracy = cluster.same("unknown_length_accuracy") * 58  # of 24 + 24 + 10 rows
    assert accuracy == pytest.approx(round(accuracy), abs=1e-3)
    assert cluster.same("unknown_length_predict") == 58


def test_logs_of_an_own_step_are_means_over_all_replicas(cluster: Cluster) -> None:
    n = len(cluster.workers)
    starts = [168 + 24 * i // n for i in range(n)]
    assert cluster.same("mean_of_own_log") == pytest.approx(np.mean(starts))


def test_logs_of_metrics_are_over_all_workers(cluster: Cluster) -> None:
    mean = (192 - 1) / 2
    logs = cluster.same("named_logs")
    assert logs["mean_row"] == pytest.approx([mean])


def test_moving_statistics_are_the_same_everywhere(cluster: Cluster) -> None:
    import mlp

    x, _ = mlp.data()
    expected = np.zeros(6)
    for start in range(0, mlp.ROWS, mlp.BATCH):  # the mean of equal parts' means
        expected = 0.99 * expected + 0.01 * x[start : start + mlp.BATCH].mean(axis=0)
    np.testing.assert_allclose(cluster.same("moving_mean"), expected, atol=1e-6)
