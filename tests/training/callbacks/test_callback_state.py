"""What callbacks know goes on in the next job, as if there had been one."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import keras
import ml_dtypes
import numpy as np
import pytest
from training_cases import X, Y, assert_same_weights, compiled, copy_of_folder, mirrored, stack

import tfdist_ext as tfd
from tfdist_ext.training.callbacks.callback_state import callback_state, restore_callbacks

EPOCHS = 8
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


def build() -> keras.Model:
    model = stack(keras.layers.Dense(4), keras.layers.Dense(1))
    return compiled(model, keras.optimizers.SGD(0.05, momentum=0.9), run_eagerly=True)


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
            copy_of_folder(folder, copies / str(epoch))

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
        checkpoint_dir=folder / "checkpoints", checkpoint_async=False,
    )  # fmt: skip
    return model, history, {"best": best.best, "rate": rate.wait, "own": own.get_state()}


def test_a_job_that_is_killed_after_an_epoch_goes_on_as_one(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    model, history, known = trained(whole, tmp_path)
    epochs = len(history.epoch)
    assert 4 < epochs < EPOCHS  # it was stopped early, after some patience
    log = (whole / "log.csv").read_text()
    for epoch in (2, epochs - 1):
        folder = tmp_path / str(epoch)
        with (folder / "log.csv").open("a") as file:  # of an epoch that is done again
            file.write("half a ro")
        again, resumed, seen = trained(folder)
        assert resumed.epoch == history.epoch
        np.testing.assert_allclose(resumed.history["loss"], history.history["loss"], rtol=1e-6)
        np.testing.assert_allclose(seen.pop("best"), known["best"], rtol=1e-6)
        assert seen["rate"] == known["rate"]
        np.testing.assert_allclose(seen["own"]["losses"], known["own"]["losses"], rtol=1e-6)
        best = [job["own"]["best"]["of the first layer"] for job in (seen, known)]
        np.testing.assert_allclose(*best, atol=1e-6)
        assert_same_weights(model, again)
        assert [line.split(",")[0] for line in (folder / "log.csv").read_text().split()] == [
            line.split(",")[0] for line in log.split()
        ]


class Knows(keras.callbacks.Callback):
    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state

    def get_state(self) -> Any:
        return self.state

    def set_state(self, state: Any) -> None:
        self.state = state


class SignalAfter(keras.callbacks.Callback):
    """SIGTERM to this process after some steps of a job."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.left = steps

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGTERM)


class Evaluates(keras.callbacks.Callback):
    """Before steps, and between them; of other numbers than those that are trained on."""

    def __init__(self, model: list[tfd.DistributedModel]) -> None:
        super().__init__()
        self.of = model

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.of[0].evaluate(X[:7], 100 * Y[:7], verbose=0)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 1:
            self.of[0].evaluate(X[:7], 100 * Y[:7], verbose=0)


class SetsRate(keras.callbacks.Callback):
    """A warm-up as users write it: begun where the training begins."""

    def on_train_begin(self, logs: Any = None) -> None:
        self.model.optimizer.learning_rate = 0.04


class CountsEpochs(keras.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.begun = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.begun += 1

    def get_state(self) -> dict[str, int]:
        return {"begun": self.begun}

    def set_state(self, state: dict[str, int]) -> None:
        self.begun = state["begun"]


def ordinary(model: list[tfd.DistributedModel]) -> list[Any]:
    schedule = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5)
    return [SetsRate(), schedule, CountsEpochs(), Evaluates(model)]


def test_a_job_that_gets_a_signal_goes_on_as_one(tmp_path: Path) -> None:
    """In an epoch, and at the end of one."""

    def train(folder: str, *more: Any) -> tuple[tfd.DistributedModel, Any, list[Any]]:
        keras.utils.set_random_seed(7)
        model = tfd.distribute(build, mirrored(2))
        used = ordinary([model])
        history = model.fit(
            X[:75], Y[:75], batch_size=15, epochs=3, verbose=0, callbacks=[*used, *more],
            checkpoint_dir=tmp_path / folder,
        )  # fmt: skip
        return model, history, used

    expected, history, used = train("whole")
    for steps in (6, 4):
        with pytest.raises(SystemExit) as ended:
            train("hurt", SignalAfter(steps))
        assert ended.value.code == 143
    model, resumed, callbacks = train("hurt")
    assert int(model.optimizer.iterations.numpy()) == 15
    assert_same_weights(expected, model)
    for name, values in resumed.history.items():
        np.testing.assert_allclose(values, history.history[name][: len(values)], rtol=1e-5)
    assert callbacks[2].begun == used[2].begun == len(resumed.epoch) == 3


def test_files_of_every_second_batch_are_those_of_one_job(tmp_path: Path) -> None:
    def train(*callbacks: Any) -> None:
        path = tmp_path / "of-{epoch}-{batch}.keras"
        files = keras.callbacks.ModelCheckpoint(path, save_freq=2)
        tfd.distribute(build, mirrored(2)).fit(
            X[:60], Y[:60], batch_size=10, epochs=2, verbose=0, callbacks=[files, *callbacks],
            checkpoint_dir=tmp_path / "checkpoints",
        )  # fmt: skip

    with pytest.raises(SystemExit):
        train(SignalAfter(3))
    train()
    names = {path.stem for path in tmp_path.glob("of-*.keras")}
    assert names == {f"of-{epoch}-{batch}" for epoch in (1, 2) for batch in (2, 4, 6)}


def test_a_process_that_was_forked_ends_by_sigterm_and_tells_nobody(tmp_path: Path) -> None:
    class Forks(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            child = os.fork()
            if child == 0:
                signal.sigtimedwait([], 20.0)
                os._exit(0)
            time.sleep(0.2)
            os.kill(child, signal.SIGTERM)
            statuses.append(os.waitpid(child, 0)[1])

    statuses: list[int] = []
    model = tfd.distribute(build, mirrored(2))
    model.fit(X, Y, epochs=2, verbose=0, callbacks=[Forks()], checkpoint_dir=tmp_path / "c")
    assert statuses == [signal.SIGTERM] * 2


def test_a_signal_after_the_last_step_is_obeyed(tmp_path: Path) -> None:
    class AtTheEnd(keras.callbacks.Callback):
        def on_train_end(self, logs: Any = None) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    model = tfd.distribute(build, mirrored(2))
    with pytest.raises(SystemExit):
        model.fit(X, Y, verbose=0, callbacks=[AtTheEnd()], checkpoint_dir=tmp_path)
    assert tfd.training_is_done(tmp_path)


def restored(saved: list[Any], callbacks: list[Any]) -> None:
    restore_callbacks(callback_state(saved), callbacks)


def test_callbacks_of_one_class_are_told_apart_by_what_they_watch() -> None:
    early = keras.callbacks.EarlyStopping
    loss, other = early("loss"), early("val_loss")
    loss.best, other.best = 1.0, 54.0
    callbacks = [early("accuracy"), early("val_loss"), early("loss")]
    restored([loss, other], callbacks)
    assert [callback.best for callback in callbacks] == [None, 54.0, 1.0]


def test_a_state_may_hold_numbers_texts_and_arrays() -> None:
    states = [
        {"n": 3, "x": 0.1 + 0.2, "none": None, "yes": True, "inf": float("inf"), "text": "ä"},
        [np.float32(1.5), np.int64(2**60), np.arange(6).reshape(2, 3), np.zeros((0, 2))],
        np.array(2.5, ml_dtypes.bfloat16),
    ]
    callbacks = [Knows(None) for _ in states]
    restored([Knows(state) for state in states], callbacks)
    assert callbacks[0].state == states[0]
    for ours, theirs in zip(states[1], callbacks[1].state, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert callbacks[2].state == states[2]
    assert callbacks[2].state.dtype == states[2].dtype
    for state in ({"model": keras.layers.Dense(1)}, np.array(["a", None]), {1: 2}):
        with pytest.raises(tfd.TrainingError, match="The state of Knows must hold numbers"):
            callback_state([Knows(state)])
