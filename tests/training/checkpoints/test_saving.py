"""One file of all state, restored on any strategy; and files written in the background."""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from checkpoint_cases import (
    FailsIn,
    adam,
    dense,
    everything,
    train,
)
from training_cases import (
    X,
    Y,
    assert_same_weights,
    classifier,
    compiled,
    mirrored,
    stack,
    strategy_of,
)

import tfdist_ext as tfd
from tfdist_ext.training.checkpoints.folder import CheckpointFolder
from tfdist_ext.training.checkpoints.format import Progress, encode_checkpoint
from tfdist_ext.training.state import BLOCK_BYTES, assign_whole, state_of

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

WRITES = "tfdist_ext.training.checkpoints.folder.encode_checkpoint"


def test_statistics_of_normalization_are_restored(tmp_path: Path) -> None:
    """A call of the layer uses constants, which are made of its variables."""

    def build() -> keras.Model:
        return compiled(stack(keras.layers.Normalization(), keras.layers.Dense(1)), "sgd")

    adapted = build()
    adapted.layers[0].adapt(3 * X + 1)
    model, other = tfd.distribute(adapted, mirrored()), tfd.distribute(build, mirrored())
    model.save_checkpoint(tmp_path / "checkpoint")
    other.predict(X, verbose=0)  # compiles the step
    other.restore_checkpoint(tmp_path / "checkpoint")
    np.testing.assert_array_equal(other.predict(X, verbose=0), model.predict(X, verbose=0))
    np.testing.assert_array_equal(other(X), model(X))


class OfParts(keras.Model):
    """Trains by the optimizer of a model inside it, has another, and counts in tf.Variables."""

    def __init__(self):
        super().__init__()
        self.part = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
        self.part.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
        self.others = {"a/b": [keras.optimizers.SGD(0.02, momentum=0.5)]}
        self.mean = tf.Variable(0.0, trainable=False)
        self.more = [tf.Variable([1.0, 2.0], trainable=False)]
        self.words = {str(number): number for number in range(2000)}
        self.words["this"] = [self.words]

    def build(self, shape):
        self.others["a/b"][0].build(self.part.trainable_variables)
        self.built = True

    def call(self, x):
        return self.part(x)

    def get_config(self):
        return {}

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self.part(x) - y) ** 2)
        weights = self.part.trainable_weights
        self.part.optimizer.apply(tape.gradient(loss, weights), weights)
        self.mean.assign_add(tf.reduce_mean(x))
        self.more[0].assign_add([tf.reduce_mean(y)] * 2)
        return {"loss": loss}


def test_state_that_keras_does_not_list_is_restored(tmp_path: Path) -> None:
    def build() -> keras.Model:
        model = OfParts()
        model.build((None, 5))
        model.compile(None)
        return model

    def fit(model: Any, **options: Any) -> Any:
        keras.utils.set_random_seed(1)
        model.fit(X, Y, batch_size=16, shuffle=False, verbose=0, **options)
        return model

    keras.utils.set_random_seed(1)
    plain = fit(build(), epochs=2)
    keras.utils.set_random_seed(1)
    model = tfd.distribute(build, mirrored())
    slot = "others.a_b.0.SGD/sequential_dense_kernel_momentum"
    assign_whole(state_of(model)[slot], np.float32([[1], [2], [3], [4], [5]]))
    fit(model, checkpoint_dir=tmp_path)
    state = everything(model)
    assert {"model/mean", "model/more.0", "models.1.optimizer.SGD/iteration"} <= {*state}
    other = tfd.distribute(build, strategy_of("default"))
    (file,) = tfd.finished_checkpoints(tmp_path)
    with pytest.raises(tfd.TrainingError, match=r"models\.1\.optimizer\S+ was .* and is missing"):
        other.restore_checkpoint(file)  # no step has built the optimizer
    fit(other, checkpoint_dir=tmp_path, epochs=2)
    assert_same_weights(plain, other)
    assert everything(other)[slot].ravel().tolist() == [1, 2, 3, 4, 5]
    assert float(other.keras_model.mean) == pytest.approx(float(plain.mean), abs=1e-5)
    # The optimizers are the model's own: one of them counts the steps.
    assert other.restore_checkpoint(tfd.finished_checkpoints(tmp_path)[-1]).step == 8


def test_a_model_that_is_not_compiled_takes_the_weights_alone(tmp_path: Path) -> None:
    model = tfd.distribute(dense(4, 1, optimizer="adam"), mirrored())
    model.save_checkpoint(tmp_path / "one")
    not_compiled = stack(*map(keras.layers.Dense, (4, 1)))
    plain = tfd.distribute(not_compiled, strategy_of("default"))
    plain.restore_checkpoint(tmp_path / "one")
    assert_same_weights(model, plain)
    plain.save_checkpoint(tmp_path / "weights")
    before = everything(model)
    model.restore_checkpoint(tmp_path / "weights")  # it has nothing of the optimizer
    np.testing.assert_equal(everything(model), before)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (dense(5, 1), r"kernel was float32 \(5, 4\) and is float32 \(5, 5"),
        (dense(4, 1, optimizer="adam"), r"optimizer.Adam/\S+ was missing and is"),
    ],
    ids=["other shapes", "other optimizer"],
)
def test_another_model_is_refused_and_left_alone(build: Any, words: str, tmp_path: Path) -> None:
    tfd.distribute(dense(4, 1), strategy_of("default")).save_checkpoint(tmp_path / "saved")
    model = tfd.distribute(build, mirrored())
    before = everything(model)
    with pytest.raises(tfd.TrainingError, match=rf"{words}.* Use the code that wrote it, or ano"):
        model.restore_checkpoint(tmp_path / "saved")
    for name, value in everything(model).items():
        if name in before:  # not the slots that were made meanwhile
            np.testing.assert_array_equal(value, before[name])


class SavesItself(keras.callbacks.Callback):
    def __init__(self, folder: Path):
        super().__init__()
        self.folder = folder

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.model.save_checkpoint(self.folder / "inside")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.model.save_checkpoint(self.folder / f"epoch {epoch}")


@pytest.mark.parametrize("with_folder", [False, True])
def test_a_callback_saves_the_epoch_that_has_ended(with_folder: bool, tmp_path: Path) -> None:
    model, folder = tfd.distribute(classifier(), mirrored()), tmp_path / "run"
    options = {"checkpoint_dir": folder} if with_folder else {}
    for _ in range(1 if with_folder else 2):  # the second fit counts from 0 again
        saves = SavesItself(tmp_path)
        model.fit(X, Y, batch_size=16, epochs=2, verbose=0, callbacks=[saves], **options)
    epochs = [model.restore_checkpoint(tmp_path / f"epoch {n}").epoch for n in range(2)]
    assert epochs == [1, 2]
    assert model.restore_checkpoint(tmp_path / "inside").epoch == 1


def test_reading_a_checkpoint_reports_each_block(tmp_path: Path) -> None:
    """A resume that takes longer than the limit of a phase is no stall."""
    blocks: list[None] = []
    folder = CheckpointFolder(tmp_path, lambda: blocks.append(None))
    folder.write(Progress(1), encode_checkpoint(Progress(1), {"x": np.zeros(5 << 20)}))
    folder.find_newest()
    assert len(blocks) >= (5 << 23) // BLOCK_BYTES


def test_a_folder_is_refused_and_folders_above_a_file_are_made(tmp_path: Path) -> None:
    model = tfd.distribute(dense(4, 1), mirrored())
    with pytest.raises(tfd.TrainingError, match="is a folder, but a checkpoint is a file"):
        model.save_checkpoint(tmp_path)
    model.save_checkpoint(tmp_path / "made" / "with it" / "one")


def test_a_full_disk_leaves_the_file_before(tmp_path: Path, monkeypatch: Any) -> None:
    """A limit on the size of files stands for a full disk: the system refuses the write alike."""
    model, path = tfd.distribute(classifier("adam"), mirrored()), tmp_path / "one"
    model.save_checkpoint(path)
    held = path.read_bytes()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(len(held) * 0.99), before[1]))
    try:
        with pytest.raises(tfd.TrainingError, match="one cannot be written: File too large"):
            model.save_checkpoint(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.read_bytes() == held
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


def call_before_each_file(monkeypatch: pytest.MonkeyPatch, action: Callable[[int], None]) -> None:
    """`action` gets the epoch, in the thread that writes the file."""
    ordinary = encode_checkpoint

    def encode(progress: Progress, *rest: Any) -> Iterator[Any]:
        action(progress.epoch)
        yield from ordinary(progress, *rest)

    monkeypatch.setattr(WRITES, encode)


class Follows(keras.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.begun = 0  # epochs
        self.weights: list[Any] = [None]

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.begun += 1

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.weights.append(self.model.get_weights())


def test_the_training_goes_on_while_a_checkpoint_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Follows()
    seen: list[Any] = []  # epoch that is written, epochs that have begun, thread

    def slow(epoch: int) -> None:
        deadline = time.monotonic() + 20
        while training.begun <= epoch < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.5)
        thread = threading.current_thread().name.rsplit("_", 1)[0]
        seen.append((epoch, training.begun, thread))

    with monkeypatch.context() as patch:
        call_before_each_file(patch, slow)
        train(tmp_path, training)
        # The next epoch had begun, and not the one after it.
        assert seen == [(epoch, min(epoch + 1, 4), "tfdist-checkpoints") for epoch in (1, 2, 3, 4)]
        restored = tfd.distribute(adam, mirrored(2))
        for epoch in (2, 3):
            restored.restore_checkpoint(tmp_path / f"epoch-{epoch:05d}.safetensors")
            for value, saved in zip(restored.get_weights(), training.weights[epoch], strict=True):
                np.testing.assert_array_equal(value, saved)
        seen.clear()
        train(tmp_path / "at once", checkpoint_async=False, epochs=2)
    assert [thread for _, _, thread in seen] == [threading.current_thread().name] * 2


def test_a_file_that_cannot_be_written_is_an_error_of_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At the end of fit. The next job resumes from the file before."""

    def full_disk(written: int) -> None:
        if written == 4:
            raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        call_before_each_file(patch, full_disk)
        words = "epoch-00004.safetensors cannot be written: No space left on device. Free disk"
        with pytest.raises(tfd.TrainingError, match=words):
            train(tmp_path)
    last = tmp_path / "epoch-00003.safetensors"
    assert f"The last checkpoint is {last}, after epoch 3" in capsys.readouterr().err
    assert tfd.finished_checkpoints(tmp_path)[-1] == last
    assert not list(tmp_path.glob(".*"))
    assert train(tmp_path).history.epoch == [0, 1, 2, 3]


def test_an_error_of_the_training_waits_for_the_file_that_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    call_before_each_file(monkeypatch, lambda epoch: time.sleep(1.0))
    with pytest.raises(KeyError):
        train(tmp_path, FailsIn(2, KeyError))
    assert tfd.finished_checkpoints(tmp_path)[-1].stem == "epoch-00002"
    assert "The last checkpoint is" in capsys.readouterr().err
