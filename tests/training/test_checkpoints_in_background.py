"""Checkpoints that are written while the training goes on: from a copy, one at a time."""

from __future__ import annotations

import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from training_cases import X, Y, assert_same_weights, mirrored

import tfdist_ext as tfd
from tfdist_ext.training.checkpoints import file, saving

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


def build() -> keras.Model:
    model = keras.Sequential(
        [keras.Input((5,)), keras.layers.Dense(4, dtype="bfloat16"), keras.layers.Dense(1)]
    )
    model.compile(keras.optimizers.Adam(0.05), "mse", metrics=["mae"])
    return model


def train(folder: Path, *callbacks: Any, epochs: int = 4, **options: Any) -> tfd.DistributedModel:
    keras.utils.set_random_seed(7)
    model = tfd.distribute(build, mirrored(2))
    model.fit(
        X, Y, batch_size=16, epochs=epochs, verbose=0, callbacks=[*callbacks],
        checkpoint_dir=folder, **options,
    )  # fmt: skip
    return model


class SlowDisk:
    """Each file takes until the training is one epoch further, and half a second more."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.threads: set[str] = set()
        self.seen: list[tuple[int, int]] = []  # (epoch that is written, epochs that have begun)
        self.begun = 0
        ordinary = saving.write_checkpoint

        def slow(path: Path, groups: Any, kinds: Any, fields: Any, *rest: Any) -> None:
            self.threads.add(threading.current_thread().name)
            deadline = time.monotonic() + 20
            while self.begun <= fields["epoch"] < 4 and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(0.5)
            self.seen.append((fields["epoch"], self.begun))
            ordinary(path, groups, kinds, fields, *rest)

        monkeypatch.setattr(saving, "write_checkpoint", slow)
        self.callback = keras.callbacks.LambdaCallback(on_epoch_begin=self._begins)

    def _begins(self, epoch: int, logs: Any) -> None:
        self.begun = epoch + 1


def test_the_training_goes_on_while_a_checkpoint_of_before_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [train(tmp_path / str(n), epochs=n) for n in (2, 3)]
    disk = SlowDisk(monkeypatch)
    train(tmp_path / "slow", disk.callback)
    written = [seen for seen in disk.seen if seen[0] < 4]
    assert written == [(1, 2), (2, 3), (3, 4)]  # the next epoch had begun, and the one after it not
    assert {name.rsplit("_", 1)[0] for name in disk.threads} == {"tfdist-checkpoints"}
    for epoch, model in zip((2, 3), expected, strict=True):
        restored = tfd.distribute(build, mirrored(2))
        (path,) = (tmp_path / "slow").glob(f"epoch-{epoch:05d}.h5")
        restored.restore_checkpoint(path)
        assert_same_weights(model, restored)


def test_where_there_is_no_memory_for_a_copy(tmp_path: Path, monkeypatch: Any) -> None:
    disk = SlowDisk(monkeypatch)
    disk.begun = 99
    train(tmp_path, checkpoint_async=False, epochs=2)
    assert disk.threads == {threading.current_thread().name}


@pytest.mark.parametrize("last", [False, True])
def test_what_cannot_be_written_is_an_error_of_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: bool
) -> None:
    """At the next save, or at the end of fit; what was there before is gone on from."""
    ordinary = saving.write_checkpoint

    def full(path: Path, groups: Any, kinds: Any, fields: Any, *rest: Any) -> None:
        if fields["epoch"] == (4 if last else 2):
            raise OSError(28, "No space left on device", str(path))
        ordinary(path, groups, kinds, fields, *rest)

    monkeypatch.setattr(saving, "write_checkpoint", full)
    with pytest.raises(OSError, match="No space left"):
        train(tmp_path)
    monkeypatch.setattr(saving, "write_checkpoint", ordinary)
    names = [path.name for path in tfd.finished_checkpoints(tmp_path)]
    assert names[-1] == ("epoch-00003.h5" if last else "epoch-00001.h5")
    expected = train(tmp_path / "whole")
    assert_same_weights(expected, train(tmp_path))


def test_an_error_of_the_training_waits_for_what_is_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(epoch: int, logs: Any) -> None:
        if epoch == 2:
            raise KeyError("mine")

    ordinary = saving.write_checkpoint

    def slow(*arguments: Any) -> None:
        time.sleep(1.0)
        ordinary(*arguments)

    monkeypatch.setattr(saving, "write_checkpoint", slow)
    with pytest.raises(KeyError):
        train(tmp_path, keras.callbacks.LambdaCallback(on_epoch_begin=fail))
    assert tfd.finished_checkpoints(tmp_path)[-1].name == "epoch-00002.h5"
    assert "The last checkpoint is" in capsys.readouterr().err


def test_a_kill_while_a_file_is_written_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is copied after each block of each file, as a kill would leave it."""
    folder, ordinary = tmp_path / "folder", file._write
    copies: list[Path] = []

    def copying(*arguments: Any) -> None:
        copy = tmp_path / f"copy-{len(copies)}"
        if arguments[0].name.endswith("model"):
            shutil.copytree(folder, copy)
            copies.append(copy)
        ordinary(*arguments)

    expected = train(tmp_path / "whole", epochs=3)
    monkeypatch.setattr(file, "_write", copying)
    train(folder, epochs=3)
    monkeypatch.setattr(file, "_write", ordinary)
    assert len(copies) > 8
    for copy in copies[4:12:4]:
        assert_same_weights(expected, train(copy, epochs=3))


def test_memory_is_kept_for_the_next_copy_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tfd.distribute(build, mirrored(2))
    model.fit(X, Y, epochs=1, verbose=0)
    copies = file.CopiesInMemory()
    state = saving.state_of(model.keras_model)
    first = copies.of(state)
    model.fit(X, Y, epochs=1, verbose=0)
    second = copies.of(saving.state_of(model.keras_model))
    for group, named in first.items():
        for name, copied in named.items():
            assert second[group][name].value is copied.value
            now = file.whole_value(state[group][name])
            np.testing.assert_array_equal(copied.value, now)
            assert copied.value.dtype == now.dtype
    writer = saving.BackgroundWriter(lambda: None)
    nice = []
    writer.begin(
        lambda wrote: nice.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
    )
    writer.wait()
    writer.close()
    assert nice == [19]
    assert os.getpriority(os.PRIO_PROCESS, 0) < 19
