"""What callbacks know goes on in the next job, as if there had been one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import keras
import ml_dtypes
import numpy as np
import pytest
from training_cases import X, Y, assert_same_weights, mirrored

import tfdist_ext as tfd
from tfdist_ext.training.checkpoints.state import callback_state, restore_callbacks

EPOCHS = 8
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


def build() -> keras.Model:
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(4), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse", run_eagerly=True)
    return model


class Remembers(keras.callbacks.Callback):
    """Of the user's own: the losses that it has seen, and the best weights of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []
        self.best: np.ndarray | None = None

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if not self.losses or logs["loss"] < min(self.losses):
            self.best = self.model.get_weights()[0]
        self.losses.append(logs["loss"])

    def get_state(self) -> dict[str, Any]:
        return {"losses": self.losses, "best": {"of the first layer": self.best}}

    def set_state(self, state: dict[str, Any]) -> None:
        self.losses = state["losses"]
        self.best = state["best"]["of the first layer"]


def trained(folder: Path, copies: Path | None = None) -> tuple[Any, keras.callbacks.History, Any]:
    """A training into a folder; `copies` get it as a kill at the beginning of each epoch does."""

    def look(epoch: int, logs: Any) -> None:
        if copies is not None and epoch:
            shutil.copytree(folder, copies / str(epoch))

    rate = keras.callbacks.ReduceLROnPlateau("loss", factor=0.3, patience=1, min_delta=0.02)
    best = keras.callbacks.ModelCheckpoint(
        folder / "best.weights.h5", "loss", save_best_only=True, save_weights_only=True
    )
    own = Remembers()
    callbacks = [
        rate,
        keras.callbacks.EarlyStopping(
            "loss", patience=3, min_delta=0.02, restore_best_weights=True
        ),
        best,
        keras.callbacks.CSVLogger(folder / "log.csv"),
        own,
        keras.callbacks.LambdaCallback(on_epoch_begin=look),
    ]
    keras.utils.set_random_seed(7)
    model = tfd.distribute(build, mirrored(2))
    history = model.fit(
        X, Y, batch_size=16, epochs=EPOCHS, verbose=0, callbacks=callbacks,
        checkpoint_dir=folder / "checkpoints",
    )  # fmt: skip
    return model, history, {"best": best.best, "rate": rate.wait, "own": own.get_state()}


def test_a_job_that_is_killed_after_any_epoch_goes_on_as_one(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    model, history, known = trained(whole, tmp_path)
    epochs = len(history.epoch)
    assert 4 < epochs < EPOCHS  # it was stopped early, after some patience
    log = (whole / "log.csv").read_text()
    for epoch in range(1, epochs):
        folder = tmp_path / str(epoch)
        with (folder / "log.csv").open("a") as file:  # of an epoch that is done again
            file.write("half a ro")
        again, resumed, found = trained(folder)
        assert resumed.epoch == history.epoch
        np.testing.assert_allclose(resumed.history["loss"], history.history["loss"], rtol=1e-6)
        np.testing.assert_allclose(found.pop("best"), known["best"], rtol=1e-6)
        assert found["rate"] == known["rate"]
        np.testing.assert_allclose(found["own"]["losses"], known["own"]["losses"], rtol=1e-6)
        best = [each["own"]["best"]["of the first layer"] for each in (found, known)]
        np.testing.assert_allclose(*best, atol=1e-6)
        assert_same_weights(model, again)
        assert [line.split(",")[0] for line in (folder / "log.csv").read_text().split()] == [
            line.split(",")[0] for line in log.split()
        ]


def test_a_training_that_was_told_to_stop_does_not_go_on(tmp_path: Path) -> None:
    """It was killed between its last checkpoint and its end."""
    whole = tmp_path / "whole"
    whole.mkdir()
    model, history, _ = trained(whole)
    index = whole / "checkpoints" / "checkpoints.json"
    (last,) = (whole / "checkpoints").glob("last-*.h5")
    last.unlink()
    index.unlink()
    with pytest.warns(UserWarning, match="is missing; rebuilt from"):
        again, resumed, _ = trained(whole)
    assert resumed.epoch == history.epoch
    assert_same_weights(model, again)


class Knows(keras.callbacks.Callback):
    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state

    def get_state(self) -> Any:
        return self.state

    def set_state(self, state: Any) -> None:
        self.state = state


def test_what_a_state_may_be() -> None:
    given = [
        {"n": 3, "x": 0.1 + 0.2, "none": None, "yes": True, "inf": float("inf"), "text": "ä"},
        [np.float32(1.5), np.int64(2**60), np.arange(6).reshape(2, 3), np.zeros((0, 2))],
        np.array(2.5, ml_dtypes.bfloat16),
    ]
    state = callback_state([Knows(each) for each in given], stopped=True)
    found = [Knows(None) for _ in given]
    assert restore_callbacks(state, found)
    assert found[0].state == given[0]
    for ours, theirs in zip(given[1], found[1].state, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert found[2].state == given[2]
    assert found[2].state.dtype == given[2].dtype


def test_a_callback_that_was_not_there_begins_anew() -> None:
    state = callback_state([Knows(1)], stopped=False)
    found = [keras.callbacks.EarlyStopping(), Knows(None), Knows("new")]
    assert not restore_callbacks(state, found)
    assert (found[0].wait, found[1].state, found[2].state) == (0, 1, "new")


@pytest.mark.parametrize("state", [{"model": keras.layers.Dense(1)}, np.array(["a", None])])
def test_what_cannot_be_stored_is_refused(state: Any) -> None:
    with pytest.raises(tfd.TrainingError, match=r"get_state\(\) of Knows must be numbers, texts"):
        callback_state([Knows(state)], stopped=False)
