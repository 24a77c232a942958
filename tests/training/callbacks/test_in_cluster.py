"""Which callbacks run on which task; and two real workers that save one set of files."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from warm_programs import run_cluster

from tfdist_ext.training.distribution import callbacks_of_this_task
from tfdist_ext.training.loop import uses_batch_hooks

PROGRAMS = Path(__file__).parents[2] / "programs"
sys.path.insert(0, str(PROGRAMS))


class Each(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        pass


class EachTest(keras.callbacks.Callback):
    def on_test_batch_begin(self, batch, logs=None):
        pass


K = keras.callbacks


class OwnHistory(K.History):
    def on_train_batch_end(self, batch, logs=None):
        pass


@pytest.mark.parametrize(
    ("callback", "kinds"),
    [
        pytest.param(Each(), {"train"}, id="own"),
        pytest.param(EachTest(), {"test"}, id="own, of evaluation"),
        pytest.param(K.LambdaCallback(on_train_batch_end=print), {"train"}, id="lambda on batches"),
        pytest.param(K.TerminateOnNaN(), set(), id="looks for NaN"),
        pytest.param(K.History(), set(), id="history"),
        pytest.param(K.ProgbarLogger(), set(), id="progress bar"),
        pytest.param(OwnHistory(), {"train"}, id="history of the user's"),
        pytest.param(K.ModelCheckpoint("x.keras"), set(), id="checkpoint of epochs"),
        pytest.param(K.ModelCheckpoint("x.keras", save_freq=5), {"train"}, id="of batches"),
        pytest.param(K.TensorBoard("x"), set(), id="board of epochs"),
        pytest.param(K.TensorBoard("x", update_freq="batch"), {"train", "test"}, id="of batches"),
    ],
)
def test_callbacks_on_batches_are_known(
    callback: keras.callbacks.Callback, kinds: set[str]
) -> None:
    assert {kind for kind in ("train", "test") if uses_batch_hooks([callback], kind)} == kinds


def test_only_the_chief_writes_and_prints() -> None:
    writers = [K.CSVLogger("x"), K.ModelCheckpoint("x.keras")]
    writers += [K.TensorBoard("x"), K.ProgbarLogger(), K.RemoteMonitor()]
    deciding = [K.EarlyStopping(verbose=1), K.ReduceLROnPlateau(verbose=1), Each()]
    assert callbacks_of_this_task([writers, deciding], is_chief=True) == writers + deciding
    assert callbacks_of_this_task(None, is_chief=True) == []
    assert callbacks_of_this_task(deciding[0], is_chief=True) == deciding[:1]
    assert deciding[0].verbose == 1
    assert callbacks_of_this_task(writers + deciding, is_chief=False) == deciding
    assert [callback.verbose for callback in deciding[:2]] == [0, 0]


class Workers:
    """What both reported and logged, and the directory they shared."""

    def __init__(self, logs: list[str], shared: Path):
        self.logs = logs
        self.shared = shared
        self.results = [json.loads(log.rsplit("RESULT ", 1)[1].splitlines()[0]) for log in logs]

    def same(self, key: str) -> Any:
        one, other = (result[key] for result in self.results)
        assert one == other, key
        return one


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Workers:
    shared = tmp_path_factory.mktemp("shared")
    command = [sys.executable, str(PROGRAMS / "checkpoint_workers.py"), str(shared)]
    logs = run_cluster(command, tmp_path_factory.mktemp("logs"), timeout=200, workers=2)
    return Workers([*logs.values()], shared)


def test_a_training_that_was_broken_off_goes_on_alike_on_all(workers: Workers) -> None:
    assert workers.same("whole_epochs") == [0, 1, 2, 3]
    assert workers.same("resumed_epochs") == [0, 1, 2, 3]
    np.testing.assert_allclose(workers.same("resumed"), workers.same("whole"), atol=1e-6)
    workers.same("whole_bits")
    workers.same("resumed_bits")
    one, other = workers.same("shuffled_until_resumed")
    assert one == other


def test_checkpoints_are_on_the_chiefs_disk_alone(workers: Workers) -> None:
    folders = {path.name for path in workers.shared.iterdir() if path.is_dir()}
    assert {"whole0", "parts0"} <= folders
    assert not {"whole1", "parts1"} & folders
    names = sorted(path.name for path in (workers.shared / "parts0").iterdir())
    epochs = [f"epoch-0000{epoch}.safetensors" for epoch in (2, 3, 4)]
    assert names == [*epochs, "owner.json"]


def test_all_take_over_what_the_chief_reads(workers: Workers) -> None:
    assert workers.same("saved_when_it_returns") is True
    assert workers.same("progress") == [4, 4 * 8]
    assert workers.same("restored_bits") == workers.same("resumed_bits")


def test_an_error_of_the_chief_is_known_to_all(workers: Workers) -> None:
    for name, words in {
        "missing": "cannot be read: No such file",
        "other": "of another model or optimizer: model/",
    }.items():
        chief, other = (result[name] for result in workers.results)
        assert words in chief
        assert other.startswith("The chief could not ")
        assert chief in other


def test_one_process_takes_over_a_clusters_checkpoint(workers: Workers) -> None:
    import mlp
    import tensorflow as tf
    from training_cases import mirrored

    import tfdist_ext as tfd

    model = tfd.distribute(mlp.build_with_state, mirrored(4), synchronize_batch_norm=False)
    model.restore_checkpoint(workers.shared / "one.safetensors")
    weights = np.concatenate([np.ravel(w) for w in model.keras_model.get_weights()])
    np.testing.assert_array_equal(weights, np.float32(workers.same("resumed")))
    assert int(model.keras_model.optimizer.iterations.numpy()) == 4 * 8
    loaded = tf.saved_model.load(workers.shared / "exported")
    x, _ = mlp.data()
    np.testing.assert_allclose(loaded.serve(x[:10]), workers.same("predicted"), atol=1e-6)


def test_callbacks_write_one_set_of_files(workers: Workers) -> None:
    workers.same("logs")
    written = workers.same("written_when_fit_returns")
    events = [name for name in written if name.startswith("board/")]
    assert sorted(Path(name).parent.name for name in events) == ["train", "validation"]
    rest = [name for name in written if not name.startswith("board/")]
    assert rest == ["best.weights.h5", "each/1.keras", "each/2.keras", "log.csv"]
    with open(workers.shared / "callbacks" / "log.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["epoch"] for row in rows] == ["0", "1"]
    for row, logs in zip(rows, workers.same("logs"), strict=True):
        assert {name: float(row[name]) for name in logs} == pytest.approx(logs)


def test_a_callback_that_writes_by_itself_writes_on_the_chief(workers: Workers) -> None:
    import mlp
    import tensorflow as tf

    expected = ["0.keras", "1", "1.keras", "1.weights.h5"]
    assert workers.same("own_written_when_fit_returns") == expected
    trained = np.float32(workers.same("weights_after_own_writes"))
    own = workers.shared / "own"
    model = keras.models.load_model(own / "1.keras")
    np.testing.assert_array_equal(mlp.flat(model), trained)
    model = keras.models.load_model(own / "0.keras")
    assert abs(mlp.flat(model) - trained).max() > 1e-3
    model.load_weights(own / "1.weights.h5")
    x, _ = mlp.data()
    loaded = tf.saved_model.load(own / "1")
    np.testing.assert_allclose(loaded.serve(x[:10]), model.predict(x[:10], verbose=0), atol=1e-6)


def test_weights_that_only_the_chief_has_are_loaded_on_all(workers: Workers) -> None:
    for name, values in workers.same("loaded_on_the_chief").items():
        assert set(values) == {0.25}, name
    assert set(workers.same("normalized")) == {(5.0 - 1.0) / 4.0**0.5}
    chief, other = (result["no weights"] for result in workers.results)
    assert "none.weights.h5" in chief
    assert other.startswith("TrainingError: The chief could not load ")
    assert "none.weights.h5" in other


def test_success_does_not_end_in_an_error(workers: Workers) -> None:
    assert "worker 1 is done" in workers.logs[1]
    for log in workers.logs:
        assert "crashed" not in log
        assert "UNAVAILABLE" not in log
