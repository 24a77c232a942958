"""Trainings that go on where they ended, with the numbers of one without a break."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from checkpoint_cases import FIT, FailsIn, assert_same_state, dense
from training_cases import (
    KillAfter,
    KilledError,
    Reshuffled,
    X,
    Y,
    assert_same_weights,
    copy_of_folder,
    mirrored,
    of_unknown_length,
    stack,
    steps_taken,
)

import tfdist_ext as tfd
from tfdist_ext.training.checkpoints.folder import (
    finished_checkpoints,
    training_is_done,
)


def momentum() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.1, momentum=0.9)


def with_much_state(dtype: str = "float32", **of_adam: Any) -> Callable[[], keras.Model]:
    """Moving statistics, dropout's seeds, Adam's slots, metrics, and a loss scale if asked for."""

    def build() -> keras.Model:
        model = stack(
            keras.layers.Dense(6, activation="tanh", dtype=dtype),
            keras.layers.BatchNormalization(momentum=0.8),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(1, activation="sigmoid", dtype="float32"),
        )
        optimizer = keras.optimizers.Adam(0.02, **of_adam)
        if dtype == "mixed_float16":
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer, dynamic_growth_steps=3)
        # Eager: what is saved is the same, and few steps take less time than making a graph of one.
        model.compile(optimizer, "binary_crossentropy", metrics=["accuracy"], run_eagerly=True)
        return model

    return build


def as_left_by_a_kill(folder: Path, copy: Path) -> keras.callbacks.Callback:
    """Copies the folder as a job that is killed before its third epoch leaves it."""

    def look(epoch: int, logs: Any) -> None:
        if epoch == 2:
            copy_of_folder(folder, copy)

    return keras.callbacks.LambdaCallback(on_epoch_begin=look)


def train_in_parts(
    whole: tfd.DistributedModel,
    resumed: tfd.DistributedModel,
    data: Callable[[], tuple[Any, ...]],
    folder: Path,
    **arguments: Any,
) -> None:
    """Train one without a break; the other goes on from how that was before its last two epochs.

    It starts from other weights, and would shuffle otherwise by itself.
    """
    arguments = {"epochs": 4, "verbose": 0, **arguments}
    kill = as_left_by_a_kill(folder / "whole", folder / "killed")
    keras.utils.set_random_seed(3)
    whole.fit(*data(), checkpoint_dir=folder / "whole", callbacks=[kill], **arguments)
    assert not training_is_done(folder / "killed")
    keras.utils.set_random_seed(3)  # TensorFlow's own shuffle goes by it
    random.seed(99)
    np.random.seed(99)
    history = resumed.fit(*data(), checkpoint_dir=folder / "killed", **arguments)
    assert history.epoch == [0, 1, 2, 3]  # of the whole training
    assert steps_taken(resumed) == steps_taken(whole)


def two_models(build: Callable[[], keras.Model], *strategies: Any) -> list[tfd.DistributedModel]:
    """One for each strategy, with weights of their own."""
    keras.utils.set_random_seed(3)
    return [
        tfd.distribute(build, strategy, synchronize_batch_norm=False) for strategy in strategies
    ]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, tfd.DistributedModel]:
    """How two models began: what is compiled for one test is there for the next."""
    folder = tmp_path_factory.mktemp("start")
    models = two_models(dense(4, 1, optimizer=momentum), mirrored(2), mirrored(2))
    starts = {folder / str(number): model for number, model in enumerate(models)}
    for path, model in starts.items():
        model.save_checkpoint(path)
    return starts


@pytest.fixture
def two(compiled: dict[Path, tfd.DistributedModel]) -> list[tfd.DistributedModel]:
    """Two of `dense(4, 1, optimizer=momentum)` on two replicas, with weights of their own."""
    for path, model in compiled.items():
        model.restore_checkpoint(path)
    return list(compiled.values())


@pytest.mark.long("loss scale")
@pytest.mark.parametrize(
    "build",
    [
        pytest.param(with_much_state("mixed_float16"), id="loss scale"),
        pytest.param(
            with_much_state(use_ema=True, ema_overwrite_frequency=3, gradient_accumulation_steps=3),
            id="averaged weights, accumulated gradients",
        ),
    ],
)
def test_all_of_an_optimizers_state_is_restored(build: Any, tmp_path: Path) -> None:
    whole, resumed = two_models(build, mirrored(), mirrored())
    train_in_parts(whole, resumed, lambda: (X, Y), tmp_path, batch_size=16)
    assert_same_state(whole, resumed, tolerance=1e-6)


def shuffled() -> tf.data.Dataset:
    data = tf.data.Dataset.from_tensor_slices((X, Y))
    return data.shuffle(64, seed=8, reshuffle_each_iteration=True).batch(16)


@pytest.mark.long("epochs inside")
@pytest.mark.parametrize(
    ("data", "arguments"),
    [
        pytest.param(lambda: (X, Y), {"steps_per_epoch": 3}, id="epochs inside of passes"),
        pytest.param(lambda: (of_unknown_length(shuffled()),), {}, id="unknown length"),
        pytest.param(lambda: (Reshuffled(),), {"shuffle": True}, id="PyDataset"),
    ],
)
@pytest.mark.filterwarnings("ignore:the data ended after")
def test_the_order_of_examples_goes_on(data: Any, arguments: Any, two: Any, tmp_path: Path) -> None:
    train_in_parts(*two, data, tmp_path, **arguments)
    assert_same_weights(*two)


def test_a_job_that_cannot_resume_does_not_stop_the_job_that_trains(
    two: Any, tmp_path: Path
) -> None:
    def start_other_job(epoch: int, logs: Any) -> None:
        if epoch == 2:
            other = tfd.distribute(keras.Sequential([keras.layers.Dense(7)]), two[0].strategy)
            other.compile("sgd", "mse")
            with pytest.raises(tfd.TrainingError):
                other.fit(X, Y, epochs=4, checkpoint_dir=tmp_path, **FIT)

    callback = keras.callbacks.LambdaCallback(on_epoch_begin=start_other_job)
    options = {"checkpoint_dir": tmp_path, "callbacks": [callback], **FIT}
    two[0].fit(X, Y, epochs=4, **options)
    assert [path.stem for path in finished_checkpoints(tmp_path)][-1] == "epoch-00004"


class AddsOneAtTheEnd(keras.callbacks.Callback):
    def on_train_end(self, logs: Any = None) -> None:
        kernel = self.model.trainable_variables[0]
        kernel.assign_add(keras.ops.ones_like(kernel))


class StopsAfterOneEpoch(keras.callbacks.Callback):
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.model.stop_training = True


def test_the_state_at_the_end_is_more_than_that_of_the_last_epoch(tmp_path: Path) -> None:
    """Averaged weights, and callbacks that change them; a restart ends with the same state."""

    build = dense(1, optimizer=lambda: keras.optimizers.Adam(0.01, use_ema=True))

    def fit() -> tfd.DistributedModel:
        model = tfd.distribute(build, mirrored(2))
        callbacks = [AddsOneAtTheEnd(), StopsAfterOneEpoch()]
        history = model.fit(
            X, Y, epochs=3, callbacks=callbacks, checkpoint_dir=tmp_path / "D", **FIT
        )
        assert history.epoch == [0]
        return model

    model = fit()
    for owner_is_lost in (False, True):  # as of a job that is killed before its end
        if owner_is_lost:
            (tmp_path / "D" / "owner.json").unlink()
        again = fit()
        assert steps_taken(again) == 4
        assert_same_weights(model, again)
        assert training_is_done(tmp_path / "D")


@pytest.mark.filterwarnings("ignore:Compiled the loaded model:UserWarning")
def test_an_epoch_whose_loss_is_nan_is_not_saved(two: Any, tmp_path: Path) -> None:
    model, good = two
    model.fit(X, Y, checkpoint_dir=tmp_path, **FIT)
    lost = np.where(np.arange(64)[:, None] == 50, np.float32("nan"), X)
    stop = keras.callbacks.TerminateOnNaN()
    with pytest.warns(UserWarning, match="the loss of epoch 2 is nan: no checkpoint is written"):
        history = model.fit(
            lost, Y, epochs=4, shuffle=False, callbacks=[stop], checkpoint_dir=tmp_path, **FIT
        )
    assert history.epoch == [0, 1]
    assert steps_taken(model) == 4 + 4  # row 50 is in the fourth batch
    assert [path.name for path in finished_checkpoints(tmp_path)] == ["epoch-00001.safetensors"]
    assert training_is_done(tmp_path)
    history = good.fit(X, Y, epochs=4, checkpoint_dir=tmp_path, **FIT)
    assert history.epoch == [0, 1, 2, 3]
    assert np.isfinite(history.history["loss"]).all()


def test_a_wrong_model_or_folder_is_refused_before_the_training(two: Any, tmp_path: Path) -> None:
    model, other = two
    file = tmp_path / "file"
    file.write_text("what somebody keeps")

    def refused(folder: Any, words: str, model: Any = other, **options: Any) -> None:
        with pytest.raises(tfd.TrainingError, match=words):
            model.fit(X, Y, checkpoint_dir=folder, **FIT, **options)

    model.fit(X, Y, checkpoint_dir=tmp_path / "D", **FIT)
    refused(tmp_path / "D", "another model", tfd.distribute(dense(3, 1), mirrored()))
    backup = keras.callbacks.BackupAndRestore(tmp_path / "backup")
    refused(None, "does not support the callback BackupAndRestore", callbacks=[backup])
    refused("", "checkpoint_dir is empty")
    refused(file, r"file/owner\.json cannot be written: .* is not a directory")
    refused(Path("/proc/checkpoints"), "cannot be written: .*No such file or directory")

    assert steps_taken(other) == 0
    assert file.read_text() == "what somebody keeps"


def test_a_job_that_resumes_says_what_has_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A loss or metric may not change; data and their order not in the middle of an epoch."""

    def fit(folder: str, rate: float = 0.25, rows: int = 64, **options: Any) -> str:
        compiled = {"loss": options.pop("loss", "mse"), "metrics": options.pop("metrics", [])}

        def build() -> keras.Model:
            model = dense(1)()
            model.compile(keras.optimizers.SGD(rate), run_eagerly=True, **compiled)
            return model

        model = tfd.distribute(build, mirrored())
        options = {**FIT, "checkpoint_dir": tmp_path / folder, **options}
        model.fit(X[:rows], Y[:rows], **options)
        assert float(model.optimizer.learning_rate) == 0.25
        return capsys.readouterr().err

    fit("whole")
    for settings in ({"loss": "mae"}, {"metrics": ["mae"]}):
        with pytest.raises(tfd.TrainingError, match=r"(loss was mse|0 was missing) and is mae\. C"):
            fit("whole", epochs=2, **settings)
    said = fit("whole", rate=0.5, rows=60, batch_size=np.int64(20), shuffle=False, epochs=2)
    for change in (
        "batch_size was 16 and is 20",
        "number of examples was 64 and is 60",
        "steps per epoch was 4 and is 3",
        "shuffle was True and is False",
        "optimizer.learning_rate was 0.5 and is 0.25, as in the checkpoint",
    ):
        assert f"; {change}" in said
    with pytest.raises(KilledError):
        fit("inside", checkpoint_every=1, callbacks=[KillAfter(2)])
    names = [path.name for path in tfd.finished_checkpoints(tmp_path / "inside")]
    assert names[-1] == "epoch-00000-batch-00000001.safetensors"
    for changed, difference in (
        ({"rows": 63}, "number of examples was 64 and is 63"),
        ({"batch_size": 20}, "batch_size was 16 and is 20"),
        ({"steps_per_epoch": 3}, "steps per epoch was 4 and is 3"),
        ({"shuffle": False}, "shuffle was True and is False"),
    ):
        with pytest.raises(tfd.TrainingError, match=rf"resume: {difference}\."):
            fit("inside", **changed)


def test_a_job_says_from_where_it_resumes_and_how_it_can_be_resumed(
    two: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken, resumed = two
    monkeypatch.setattr(sys, "orig_argv", ["python", "train.py", "--name", "a b"])
    monkeypatch.setattr(sys, "argv", ["train.py", "--name", "a b"])
    monkeypatch.delattr(sys, "ps1", raising=False)

    def said(model: Any, *failing: Any) -> str:
        end = pytest.raises(failing[1]) if failing else contextlib.nullcontext()
        callbacks = [FailsIn(*failing)] if failing else []
        with end:
            model.fit(X, Y, epochs=4, checkpoint_dir=tmp_path, callbacks=callbacks, **FIT)
        return capsys.readouterr().err

    stopped = "\ntraining stopped by KeyboardInterrupt. "
    none = f"Checkpoints go to {tmp_path} on the chief.\n"
    assert said(broken, 0, KeyboardInterrupt) == stopped + none
    newest = tmp_path / "epoch-00003.safetensors"
    last = f"The last checkpoint is {newest}, after epoch 3 (step 12)."
    again = " To resume, run again: python train.py --name 'a b'\n"
    assert said(broken, 3, KeyboardInterrupt) == stopped + last + again
    first = f"resuming after epoch 3 (step 12), from {newest}\n"
    monkeypatch.setenv("TFDIST_COMMAND", "tfdist run --workers 2 -- python train.py")
    error = said(resumed, 3, ZeroDivisionError)
    assert error.startswith(f"{first}\ntraining stopped by ZeroDivisionError. {last}")
    assert error.endswith("run again: tfdist run --workers 2 -- python train.py\n")
    monkeypatch.setenv("TFDIST_STARTS_AGAIN", "1")  # the launcher does, without a person
    assert said(resumed, 3, ZeroDivisionError).endswith(f"{last}\n")
    assert said(resumed) == first
    done = f"training in {tmp_path} is complete after epoch 4 (step 16); nothing to do\n"
    assert said(resumed) == done
