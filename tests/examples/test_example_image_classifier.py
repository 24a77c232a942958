"""The image classifier: killed and gone on with, on two workers and as on one device."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import image_classifier as example
import keras
import numpy as np
import pytest

import tfdist_ext as tfd
from tfdist_ext.testing import assert_same_on_all_replicas

EPOCHS, STEPS = 3, 16


class KillsWorker(keras.callbacks.Callback):
    """Kills worker 1 in the middle of the second epoch of the first start."""

    def __init__(self) -> None:
        super().__init__()
        self.first = 0  # step that was trained in this start

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        step = int(self.model.optimizer.iterations.numpy())
        self.first = self.first or step
        is_worker_1 = tfd.ClusterConfig.from_env().task == tfd.Task("worker", 1)
        if is_worker_1 and os.environ["TFDIST_RESTARTS"] == "0" and step == STEPS + 12:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_two_workers_that_restart_train_like_one_device(tmp_path: Path) -> None:
    tfd.launch(check_two_workers, args=(tmp_path,), max_restarts=1)


def check_two_workers(folder: Path) -> None:
    strategy = tfd.create_strategy()
    (images, labels), validation, test = example.load(1000)
    train = example.Moved(images, labels, copies=2)
    killer = KillsWorker()
    ours = example.with_tfdist_ext(
        strategy, train, validation, folder, EPOCHS, callbacks=[killer], verbose=0
    )
    # The checkpoint of step 20 may not have been complete when worker 1 was killed at step 28.
    assert (os.environ["TFDIST_RESTARTS"], killer.first) in (("1", 17), ("1", 21))

    numbers = tfd.data.from_arrays(np.arange(len(train)), global_batch_size=example.BATCH, seed=7)

    def order(epoch: int) -> np.ndarray:
        return np.concatenate(list(numbers.dataset(epoch=epoch).as_numpy_iterator()))

    by_hand = example.plain(strategy, train, validation, folder, EPOCHS, order)
    one_device = example.build(EPOCHS * STEPS)
    accuracy = []
    for epoch in range(EPOCHS):
        history = one_device.fit(
            *train[order(epoch)],
            batch_size=example.BATCH,
            shuffle=False,
            validation_data=validation,
            verbose=0,
        )
        accuracy += history.history["val_accuracy"]
    assert by_hand[0] == pytest.approx(accuracy)
    assert ours[0] == pytest.approx(accuracy)  # the history is of the whole training
    for weights in (by_hand[1], ours[1]):
        assert_same_on_all_replicas(weights, strategy=strategy)
        for weight, expected in zip(weights, one_device.get_weights(), strict=True):
            np.testing.assert_allclose(weight, expected, rtol=0, atol=1e-5)

    if tfd.ClusterConfig.from_env().is_chief:
        for file in ("model.keras", "plain.keras"):
            loaded = keras.models.load_model(folder / file)
            assert loaded.evaluate(*test, verbose=0)[1] > 0.8


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.tfdist_cluster(worker=2, timeout=120)
def test_its_main_on_two_workers(
    tfdist_cluster: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path.parents[1]  # of both tasks
    example.main(folder, rows=500, copies=1, epochs=1)
    is_chief = tfdist_cluster.task.index == 0
    assert ("on 50 images held out" in capsys.readouterr().out) == is_chief
    assert not is_chief or (folder / "model.keras").exists()
