"""One file of all state, restored on any strategy; and files written in the background."""

from __future__ import annotations

import os
import resource
import threading
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from checkpoint_cases import (
    FIT,
    FailsIn,
    adam,
    assert_same_state,
    dense,
    everything,
    train,
)
from training_cases import X, Y, assert_same_weights, classifier, mirrored, strategy_of

import tfdist_ext as tfd
from tfdist_ext.training.checkpoints import folder, paths
from tfdist_ext.training.state.naming import state_of
from tfdist_ext.training.state.values import assign_whole

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

# One file


class Pair(keras.Model):
    """Two optimizers, and layers that only a step builds."""

    def __init__(self):
        super().__init__()
        self.one = keras.layers.Dense(3)
        self.two = keras.layers.Dense(1)
        self.second = keras.optimizers.SGD(0.01, momentum=0.5)
        self.others = {"a/b": [keras.optimizers.SGD(0.02, momentum=0.5)]}

    def build(self, shape):
        self.one.build(shape)
        self.two.build((None, 3))
        for optimizer in (self.second, *self.others["a/b"]):
            optimizer.build(self.two.trainable_variables)

    def call(self, x):
        return self.two(self.one(x))


def test_every_optimizer_of_a_model(tmp_path: Path) -> None:
    def build() -> keras.Model:
        model = Pair()
        model.build((None, 5))
        model.compile("sgd", "mse")
        return model

    model = tfd.distribute(build, mirrored())
    state = state_of(model.keras_model)
    assert list(state)[2:] == ["second", "others.a_b.0"]  # the compiled one is built later
    for number, name in enumerate(["second", "others.a_b.0"]):
        slot = state[name]["dense_1_kernel_momentum"]
        assign_whole(slot, np.float32([[1], [2], [3]]) + number)
    model.save_checkpoint(tmp_path / "pair")
    other = tfd.distribute(build, strategy_of("default"))
    other.restore_checkpoint(tmp_path / "pair")
    assert_same_state(model, other)


def test_a_copy_and_the_model_itself_have_one_name_for_each_variable(tmp_path: Path) -> None:
    source = dense(4, 1, optimizer="adam")()
    source.fit(X, Y, **FIT)
    copy = tfd.distribute(source, mirrored())
    copy.save_checkpoint(tmp_path / "copy")
    inner = keras.Sequential([keras.layers.Dense(4), keras.layers.Dense(1)])
    inner.build((None, 5))  # its layers' own paths begin elsewhere
    inner.compile("adam", "mse")
    other = tfd.distribute(inner, mirrored())
    other.restore_checkpoint(tmp_path / "copy")
    assert_same_weights(source, other)


def test_a_model_that_is_not_compiled_takes_the_weights_alone(tmp_path: Path) -> None:
    def not_compiled() -> keras.Model:
        return keras.Sequential([keras.Input((5,)), *map(keras.layers.Dense, (4, 1))])

    model = tfd.distribute(dense(4, 1, optimizer="adam"), mirrored())
    model.save_checkpoint(tmp_path / "one")
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
        (dense(4), "another model or optimizer: only the checkpoint has model/dense_1/kernel"),
        (dense(5, 1), r"kernel \(saved: float32 \(5, 4\), here: float32 \(5, 5"),
        (dense(4, 1, optimizer="adam"), "has the state of SGD, .* the model is Adam"),
    ],
    ids=["fewer", "other shapes", "other optimizer"],
)
def test_another_model_is_refused_and_left_alone(build: Any, words: str, tmp_path: Path) -> None:
    tfd.distribute(dense(4, 1), strategy_of("default")).save_checkpoint(tmp_path / "saved")
    model = tfd.distribute(build, mirrored())
    before = everything(model)
    with pytest.raises(tfd.TrainingError, match=words):
        model.restore_checkpoint(tmp_path / "saved")
    for name, value in everything(model).items():
        if name in before:  # not the slots that were made meanwhile
            np.testing.assert_array_equal(value, before[name])


def test_a_path_or_a_model_that_cannot_be_saved(tmp_path: Path) -> None:
    model = tfd.distribute(dense(4, 1), mirrored())
    with pytest.raises(tfd.TrainingError, match=r"must be a file, got the folder .*: add a"):
        model.save_checkpoint(tmp_path)
    model.save_checkpoint(tmp_path / "made" / "with it" / "one")

    def unbuilt() -> keras.Model:
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    for call in ("save_checkpoint", "restore_checkpoint"):
        with pytest.raises(tfd.TrainingError, match="the model must have variables"):
            getattr(tfd.distribute(unbuilt, mirrored()), call)(tmp_path / "new")


def test_a_full_disk_leaves_the_file_before(tmp_path: Path, monkeypatch: Any) -> None:
    """A limit on the size of files stands for a full disk: the system refuses the write alike."""
    monkeypatch.setattr(paths, "SYNC_BYTES", 1000)
    model, path = tfd.distribute(classifier("adam"), mirrored()), tmp_path / "one"
    model.save_checkpoint(path)
    held = path.read_bytes()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(len(held) * 0.99), before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            model.save_checkpoint(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.read_bytes() == held
    assert [each.name for each in tmp_path.iterdir()] == ["one"]


# In the background


class SlowDisk:
    """Each file takes until the training is one epoch further, and half a second more."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.threads: set[str] = set()
        self.nice: set[int] = set()
        self.seen: list[tuple[int, int]] = []  # (epoch that is written, epochs that have begun)
        self.begun = 0
        ordinary = folder.encode_checkpoint

        def slow(write: Any, content: Any, *rest: Any) -> None:
            self.threads.add(threading.current_thread().name)
            self.nice.add(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
            deadline, epoch = time.monotonic() + 20, content.progress.epoch
            while self.begun <= epoch < 4 and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(0.5)
            self.seen.append((epoch, self.begun))
            ordinary(write, content, *rest)

        monkeypatch.setattr(folder, "encode_checkpoint", slow)
        self.callback = keras.callbacks.LambdaCallback(on_epoch_begin=self._begins)

    def _begins(self, epoch: int, logs: Any) -> None:
        self.begun = epoch + 1


def test_the_training_goes_on_while_a_checkpoint_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [train(tmp_path / str(n), epochs=n) for n in (2, 3)]
    with monkeypatch.context() as patch:
        disk = SlowDisk(patch)
        train(tmp_path / "slow", disk.callback)
    written = [seen for seen in disk.seen if seen[0] < 4]
    assert written == [(1, 2), (2, 3), (3, 4)]  # the next epoch had begun, and not the one after it
    assert {name.rsplit("_", 1)[0] for name in disk.threads} == {"tfdist-checkpoints"}
    assert disk.nice == {19}
    for epoch, model in zip((2, 3), expected, strict=True):
        restored = tfd.distribute(adam, mirrored(2))
        restored.restore_checkpoint(tmp_path / "slow" / f"epoch-{epoch:05d}.safetensors")
        assert_same_weights(model, restored)
    with monkeypatch.context() as patch:
        disk = SlowDisk(patch)
        disk.begun = 99
        train(tmp_path / "at once", checkpoint_async=False, epochs=2)
    assert disk.threads == {threading.current_thread().name}


@pytest.mark.parametrize("last", [False, True])
def test_a_file_that_cannot_be_written_is_an_error_of_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: bool
) -> None:
    """At the next save, or at the end of fit. The next job resumes from the file before."""
    ordinary = folder.encode_checkpoint

    def full_disk(write: Any, content: Any, *rest: Any) -> None:
        if content.progress.epoch == (4 if last else 2):
            raise OSError(28, "No space left on device")
        ordinary(write, content, *rest)

    kept = "epoch-00003" if last else "epoch-00001"
    with monkeypatch.context() as patch:
        patch.setattr(folder, "encode_checkpoint", full_disk)
        words = rf"could not be written to {tmp_path}: No space left on device.*is {kept}"
        with pytest.raises(tfd.TrainingError, match=words):
            train(tmp_path)
    assert tfd.finished_checkpoints(tmp_path)[-1].stem == kept
    assert not list(tmp_path.glob(".*"))
    if last:
        assert train(tmp_path).history.epoch == [0, 1, 2, 3]


def test_an_error_of_the_training_waits_for_the_file_that_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ordinary = folder.encode_checkpoint

    def slow(*arguments: Any) -> None:
        time.sleep(1.0)
        ordinary(*arguments)

    monkeypatch.setattr(folder, "encode_checkpoint", slow)
    with pytest.raises(KeyError):
        train(tmp_path, FailsIn(2, KeyError))
    assert tfd.finished_checkpoints(tmp_path)[-1].stem == "epoch-00002"
    assert "The last checkpoint is" in capsys.readouterr().err
