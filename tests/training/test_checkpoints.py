"""Checkpoints: all state, one file, any strategy; and trainings that go on where they ended."""

from __future__ import annotations

import errno
import random
import shutil
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf
from training_cases import (
    X,
    Y,
    assert_same_weights,
    classifier,
    mirrored,
    of_unknown_length,
    steps_taken,
    strategy_of,
)

import tfdist_ext as tfd
from tfdist_ext.training.checkpoints import atomic_write, file
from tfdist_ext.training.checkpoints.file import assign_whole, whole_value
from tfdist_ext.training.checkpoints.saving import finished_checkpoints, training_is_done
from tfdist_ext.training.checkpoints.state import state_of

FIT = {"batch_size": 16, "verbose": 0}


def momentum() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.1, momentum=0.9)


def dense(*units: int, optimizer: Any = "sgd") -> Callable[[], keras.Model]:
    def build() -> keras.Model:
        model = keras.Sequential([keras.Input((5,)), *map(keras.layers.Dense, units)])
        model.compile(optimizer() if callable(optimizer) else optimizer, "mse")
        return model

    return build


def with_much_state(dtype: str = "float32", **of_adam: Any) -> Callable[[], keras.Model]:
    """Moving statistics, dropout's seeds, Adam's slots, metrics, and a loss scale if asked for."""

    def build() -> keras.Model:
        model = keras.Sequential(
            [
                keras.Input((5,)),
                keras.layers.Dense(6, activation="tanh", dtype=dtype),
                keras.layers.BatchNormalization(momentum=0.8),
                keras.layers.Dropout(0.3),
                keras.layers.Dense(1, activation="sigmoid", dtype="float32"),
            ]
        )
        optimizer = keras.optimizers.Adam(0.02, **of_adam)
        if dtype == "mixed_float16":
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer, dynamic_growth_steps=3)
        # Eager: what is saved is the same, and few steps take less time than making a graph of one.
        model.compile(optimizer, "binary_crossentropy", metrics=["accuracy"], run_eagerly=True)
        return model

    return build


def everything(model: tfd.DistributedModel) -> dict[str, np.ndarray]:
    """Name -> value of all that a checkpoint holds."""
    return {
        f"{group}/{name}": whole_value(variable)
        for group, variables in state_of(model.keras_model).items()
        for name, variable in variables.items()
    }


def assert_same_state(one: Any, other: Any, tolerance: float = 0.0) -> None:
    one, other = everything(one), everything(other)
    assert list(one) == list(other)
    for name, value in one.items():
        np.testing.assert_allclose(value, other[name], rtol=0, atol=tolerance, err_msg=name)


class Break(keras.callbacks.Callback):
    """Ends the job before an epoch, as Ctrl-C does."""

    def __init__(self, epoch: int):
        super().__init__()
        self.epoch = epoch

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == self.epoch:
            raise KeyboardInterrupt


def as_left_by_a_kill(folder: Path, copy: Path) -> keras.callbacks.Callback:
    """Copies the folder as a job that is killed before its third epoch leaves it."""

    def look(epoch: int, logs: Any) -> None:
        if epoch == 2:
            shutil.copytree(folder, copy)

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


@pytest.mark.long
@pytest.mark.parametrize("name", ["default", "central_storage"])  # mirrored: the next test
def test_resumed_equals_uninterrupted(name: str, tmp_path: Path) -> None:
    whole, resumed = two_models(with_much_state(), strategy_of(name), strategy_of(name))
    train_in_parts(whole, resumed, lambda: (X, Y), tmp_path, batch_size=16)
    assert_same_state(whole, resumed, tolerance=1e-6)


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
def test_all_of_an_optimizers_state_is_in_it(build: Any, tmp_path: Path) -> None:
    whole, resumed = two_models(build, mirrored(), mirrored())
    train_in_parts(whole, resumed, lambda: (X, Y), tmp_path, batch_size=16)
    assert_same_state(whole, resumed, tolerance=1e-6)


def test_with_another_number_of_replicas(tmp_path: Path) -> None:
    build = dense(4, 1, optimizer=momentum)
    whole, resumed = two_models(build, mirrored(4), strategy_of("default"))
    train_in_parts(whole, resumed, lambda: (X, Y), tmp_path, batch_size=16)
    assert_same_weights(whole, resumed)


@pytest.mark.long
def test_ctrl_c_leaves_the_finished_epochs(two: Any, tmp_path: Path) -> None:
    broken, resumed = two
    arguments = {"epochs": 4, "checkpoint_dir": tmp_path, **FIT}
    with pytest.raises(KeyboardInterrupt):
        broken.fit(X, Y, callbacks=[Break(2)], **arguments)
    assert not training_is_done(tmp_path)
    names = [path.name for path in finished_checkpoints(tmp_path)]
    assert names == ["epoch-00001.h5", "epoch-00002.h5"]
    assert resumed.fit(X, Y, **arguments).epoch == [0, 1, 2, 3]
    assert steps_taken(broken) == 8
    assert steps_taken(resumed) == 16


class Shuffles(keras.utils.PyDataset):
    """Batches in an order that the end of each epoch changes."""

    def __init__(self):
        super().__init__()
        self.order = list(range(4))
        self.random = random.Random(5)

    def __len__(self):
        return 4

    def __getitem__(self, i):
        rows = slice(16 * self.order[i], 16 * self.order[i] + 16)
        return X[rows], Y[rows]

    def on_epoch_end(self):
        self.random.shuffle(self.order)


def shuffled() -> tf.data.Dataset:
    data = tf.data.Dataset.from_tensor_slices((X, Y))
    return data.shuffle(64, seed=8, reshuffle_each_iteration=True).batch(16)


@pytest.mark.long("shuffled data set", "epochs inside", "endless", "PyDataset")
@pytest.mark.parametrize(
    ("data", "arguments"),
    [
        pytest.param(lambda: (X, Y), {"steps_per_epoch": 3}, id="epochs inside of passes"),
        pytest.param(lambda: (shuffled(),), {}, id="shuffled data set"),
        pytest.param(lambda: (of_unknown_length(shuffled()),), {}, id="unknown length"),
        pytest.param(lambda: (shuffled().repeat(),), {"steps_per_epoch": 5}, id="endless"),
        pytest.param(lambda: (Shuffles(),), {"shuffle": False}, id="PyDataset"),
    ],
)
@pytest.mark.filterwarnings("ignore:the data ended after")
def test_the_order_of_examples_goes_on(data: Any, arguments: Any, two: Any, tmp_path: Path) -> None:
    train_in_parts(*two, data, tmp_path, **arguments)
    assert_same_weights(*two)


def test_longer_training_later_is_one_long_training(
    two: Any, compiled: Any, tmp_path: Path
) -> None:
    model, longer = two
    start = next(iter(compiled))
    keras.utils.set_random_seed(3)
    model.fit(X, Y, epochs=2, checkpoint_dir=tmp_path, **FIT)
    assert training_is_done(tmp_path)
    history = longer.fit(X, Y, epochs=5, checkpoint_dir=tmp_path, **FIT)
    assert history.epoch == [0, 1, 2, 3, 4]
    model.restore_checkpoint(start)
    keras.utils.set_random_seed(3)
    model.fit(X, Y, epochs=5, checkpoint_dir=tmp_path / "whole", **FIT)
    assert_same_weights(model, longer)


def test_a_training_that_is_done_gives_the_weights_it_ended_with(tmp_path: Path) -> None:
    """EarlyStopping takes back the best weights after the last epoch was saved."""

    def fit() -> tuple[tfd.DistributedModel, list[int]]:
        stop = keras.callbacks.EarlyStopping("val_loss", patience=1, restore_best_weights=True)
        model = tfd.distribute(classifier(run_eagerly=True), mirrored())
        worse = (X[48:], 1 - Y[48:])
        history = model.fit(
            X, Y, epochs=9, validation_data=worse, callbacks=[stop], checkpoint_dir=tmp_path, **FIT
        )
        return model, history.epoch

    keras.utils.set_random_seed(1)
    model, epochs = fit()
    assert 1 < len(epochs) < 9
    assert training_is_done(tmp_path)
    again, same = fit()
    assert same == epochs
    assert_same_weights(model, again)
    last = tfd.distribute(classifier(run_eagerly=True), mirrored())
    last.restore_checkpoint(finished_checkpoints(tmp_path)[-1])
    with pytest.raises(AssertionError):
        assert_same_weights(model, last)


class AddsOneAtTheEnd(keras.callbacks.Callback):
    def on_train_end(self, logs: Any = None) -> None:
        self.model.trainable_variables[0].assign_add(
            keras.ops.ones_like(self.model.trainable_variables[0])
        )


class StopsAfterOneEpoch(keras.callbacks.Callback):
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.model.stop_training = True


@pytest.mark.parametrize(
    ("optimizer", "callback", "epochs", "once"),
    [
        ({}, None, 2, True),
        ({}, keras.callbacks.EarlyStopping("loss"), 2, True),
        ({}, keras.callbacks.EarlyStopping("loss", restore_best_weights=True), 2, False),
        ({"use_ema": True}, None, 2, False),
        ({}, AddsOneAtTheEnd(), 2, False),
        ({}, StopsAfterOneEpoch(), 1, False),
    ],
    ids=["plain", "stopping", "best weights", "averages", "changed", "ends early"],
)
def test_the_state_at_the_end_is_written_once_if_it_is_that_of_the_last_epoch(
    optimizer: Any, callback: Any, epochs: int, once: bool, tmp_path: Path
) -> None:
    def build() -> keras.Model:
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.01, **optimizer), "mse")
        return model

    model = tfd.distribute(build, mirrored(2))
    fit = {"epochs": 2, "checkpoint_dir": tmp_path, **FIT}
    model.fit(X, Y, callbacks=[] if callback is None else [callback], **fit)
    epoch, last = tmp_path / f"epoch-{epochs:05d}.h5", tmp_path / f"last-{epochs:05d}.h5"
    assert last.samefile(epoch) == once
    again = tfd.distribute(build, mirrored(2))
    again.restore_checkpoint(last)
    assert_same_weights(model, again)
    (tmp_path / "checkpoints.json").unlink()
    with pytest.warns(UserWarning, match="rebuilt from"):
        again.fit(X, Y, **fit)
    assert training_is_done(tmp_path)
    assert_same_weights(model, again)


def test_the_last_three_stay(two: Any, tmp_path: Path) -> None:
    model, _ = two
    (tmp_path / ".epoch-00001.h5.unfinished").write_bytes(b"of a job that was killed")
    seen = []
    look = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: seen.append(
            ([path.name for path in finished_checkpoints(tmp_path)], training_is_done(tmp_path))
        )
    )
    fit = {"callbacks": [look], "checkpoint_async": False, **FIT}
    model.fit(X, Y, epochs=5, checkpoint_dir=tmp_path, **fit)
    epochs = [f"epoch-{epoch:05d}.h5" for epoch in range(1, 6)]
    assert seen == [(epochs[max(0, n - 3) : n], False) for n in range(5)]
    assert [path.name for path in finished_checkpoints(tmp_path)] == epochs[2:]
    assert training_is_done(tmp_path)
    on_disk = sorted(path.name for path in tmp_path.iterdir())
    assert on_disk == ["checkpoints.json", *epochs[2:], "last-00005.h5", "owner-00001.json"]
    progress = model.restore_checkpoint(tmp_path / "epoch-00004.h5")
    assert (progress.epoch, progress.step) == (4, 16)
    assert finished_checkpoints(tmp_path / "nowhere") == []
    assert not training_is_done(tmp_path / "nowhere")


@pytest.mark.filterwarnings("ignore:Compiled the loaded model:UserWarning")
def test_what_is_no_number_is_not_saved(two: Any, tmp_path: Path) -> None:
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
    assert [path.name for path in finished_checkpoints(tmp_path)] == ["epoch-00001.h5"]
    assert training_is_done(tmp_path)
    history = good.fit(X, Y, epochs=4, checkpoint_dir=tmp_path, **FIT)
    assert history.epoch == [0, 1, 2, 3]
    assert np.isfinite(history.history["loss"]).all()


@pytest.mark.long
def test_metrics_go_on_too(tmp_path: Path) -> None:
    model = tfd.distribute(classifier(), mirrored())
    expected = model.evaluate(X, Y, verbose=0)
    model.save_checkpoint(tmp_path / "one")
    other = tfd.distribute(classifier(), strategy_of("default"))
    other.evaluate(X[:1], Y[:1], verbose=0)
    other.restore_checkpoint(tmp_path / "one")
    loss, compiled = (metric.result() for metric in other.keras_model.metrics)
    np.testing.assert_allclose([loss, compiled["accuracy"]], expected, rtol=1e-6)


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


def test_a_model_that_is_not_compiled_takes_the_weights_alone(two: Any, tmp_path: Path) -> None:
    model, _ = two
    model.save_checkpoint(tmp_path / "one")

    def not_compiled() -> keras.Model:
        return keras.Sequential([keras.Input((5,)), *map(keras.layers.Dense, (4, 1))])

    plain = tfd.distribute(not_compiled, strategy_of("default"))
    plain.restore_checkpoint(tmp_path / "one")
    assert_same_weights(model, plain)
    plain.save_checkpoint(tmp_path / "weights")
    optimizers = everything(model)
    model.restore_checkpoint(tmp_path / "weights")  # has nothing to say about the optimizer
    assert everything(model).keys() == optimizers.keys()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "saved.h5"
    tfd.distribute(dense(4, 1), strategy_of("default")).save_checkpoint(path)
    return path


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (dense(4), [r"another model: only the checkpoint has \S*dense\w*/kernel"]),
        (dense(4, 4, 1), ["another model", r"the checkpoint lacks \S*dense\w*/kernel"]),
        (dense(5, 1), ["another model", r"kernel \(saved: float32 \(5, 4\), here: float32 \(5, 5"]),
        (dense(4, 1, optimizer="adam"), ["state of Adam, the optimizer.*got that of SGD"]),
        (
            dense(4, 1, optimizer=momentum),
            ["must have the state of this SGD", "lacks .*momentum"],
        ),
    ],
    ids=["fewer", "more", "other shapes", "other optimizer", "other slots"],
)
def test_another_model_is_refused_and_left_alone(build: Any, words: Any, saved: Path) -> None:
    model = tfd.distribute(build, mirrored())
    before = everything(model)
    with pytest.raises(tfd.TrainingError) as raised:
        model.restore_checkpoint(saved)
    for pattern in words:
        raised.match(pattern)
    for name, value in everything(model).items():
        if name in before:  # not those of slots made meanwhile
            np.testing.assert_array_equal(value, before[name])


def test_what_is_no_checkpoint_is_refused(saved: Path, tmp_path: Path) -> None:
    model = tfd.distribute(dense(4, 1), mirrored())

    def refused(name: str, words: str, content: bytes | None = None) -> None:
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(tfd.TrainingError, match=words):
            model.restore_checkpoint(tmp_path / name)

    refused("missing", r"there is no checkpoint .*missing\. The folder has: saved\.h5")
    refused("nowhere/missing", "The folder has no files")
    refused("text", "must be a complete checkpoint", b"weights")
    whole = saved.read_bytes()
    for part in (0.3, 0.9):
        refused("part", "must be a complete checkpoint", whole[: int(len(whole) * part)])
    refused(".", r"got the folder .*saved\.h5")
    with h5py.File(tmp_path / "of_keras.weights.h5", "w") as file:
        file.create_group("layers")
    refused("of_keras.weights.h5", "must be a checkpoint of save_checkpoint")
    with h5py.File(tmp_path / "newer", "w") as file:
        file.attrs.update({"format": "tfdist_ext checkpoint", "version": 9})
    refused("newer", "or earlier, got version 9")
    with pytest.raises(tfd.TrainingError, match=r"must be a file, got the folder .*: add a"):
        model.save_checkpoint(tmp_path)

    def unbuilt() -> keras.Model:
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    with pytest.raises(tfd.TrainingError, match="the model must have variables"):
        tfd.distribute(unbuilt, mirrored()).restore_checkpoint(saved)
    with pytest.raises(tfd.TrainingError, match="the model must have variables"):
        tfd.distribute(unbuilt, mirrored()).save_checkpoint(tmp_path / "new")


def test_fit_refuses_before_it_begins(two: Any, tmp_path: Path) -> None:
    model, _ = two
    model.fit(X, Y, checkpoint_dir=tmp_path / "D", **FIT)
    with pytest.raises(tfd.TrainingError, match="another model"):
        tfd.distribute(dense(3, 1), mirrored()).fit(X, Y, checkpoint_dir=tmp_path / "D", **FIT)
    backup = keras.callbacks.BackupAndRestore(tmp_path / "backup")
    with pytest.raises(tfd.TrainingError, match="give one of them"):
        model.fit(X, Y, checkpoint_dir=tmp_path / "D", callbacks=[backup], **FIT)
    assert steps_taken(model) == 4


@pytest.mark.parametrize(
    "folder",
    ["", " ", "\t\n", 0, 5, True, b"bytes", [], "a\0b"],
    ids=["empty", "blank", "blanks", "zero", "number", "bool", "bytes", "list", "null"],
)
def test_what_is_no_folder_is_refused(
    folder: Any, two: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(tfd.TrainingError, match=r"checkpoint_dir must be .* got "):
        two[0].fit(X, Y, checkpoint_dir=folder, **FIT)
    assert not list(tmp_path.iterdir())
    assert steps_taken(two[0]) == 0


def test_a_folder_that_cannot_be_written_is_refused_before_training(
    two: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = two
    file = tmp_path / "file"
    file.write_text("what somebody keeps")
    denied = tmp_path / "denied"
    denied.mkdir()

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    for folder, words in {
        file: "got '.*file': there is a file of that name",
        file / "below": "NotADirectoryError",
        Path("/proc/checkpoints"): "FileNotFoundError",
        tmp_path / ("x" * 300): "File name too long",
        denied: "PermissionError: Permission denied",
    }.items():
        with monkeypatch.context() as patch:
            if folder == denied:  # root is denied nothing
                patch.setattr(atomic_write, "_write", refuse)
            with pytest.raises(tfd.TrainingError, match=words) as raised:
                model.fit(X, Y, checkpoint_dir=folder, **FIT)
        raised.match("checkpoint_dir must be a folder")
    assert steps_taken(model) == 0
    assert file.read_text() == "what somebody keeps"
    assert not list(denied.iterdir())


def test_a_complete_training_is_read_where_nothing_can_be_written(
    two: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, archived = two
    model.fit(X, Y, epochs=2, checkpoint_dir=tmp_path, **FIT)
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    monkeypatch.setattr(atomic_write, "_write", lambda *_: 1 / 0)
    assert archived.fit(X, Y, epochs=2, checkpoint_dir=tmp_path, **FIT).epoch == [0, 1]
    assert_same_weights(model, archived)
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before
    said = f"training in {tmp_path} is complete after 2 epochs; nothing to do\n"
    assert capsys.readouterr().err == said


def test_a_job_says_from_where_it_resumes_and_how_it_can_be_resumed(
    two: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken, resumed = two
    arguments = {"epochs": 4, "checkpoint_dir": tmp_path, **FIT}
    monkeypatch.setattr(sys, "orig_argv", ["python", "train.py", "--name", "a b"])
    monkeypatch.setattr(sys, "argv", ["train.py", "--name", "a b"])
    monkeypatch.delattr(sys, "ps1", raising=False)
    with pytest.raises(KeyboardInterrupt):
        broken.fit(X, Y, callbacks=[Break(0)], **arguments)
    assert capsys.readouterr().err == (
        f"\ntraining stopped by KeyboardInterrupt. There is no checkpoint in {tmp_path} yet.\n"
    )
    with pytest.raises(KeyboardInterrupt):
        broken.fit(X, Y, callbacks=[Break(3)], **arguments)
    assert capsys.readouterr().err == (
        "\ntraining stopped by KeyboardInterrupt. The last checkpoint is"
        f" {tmp_path / 'epoch-00003.h5'}, after epoch 3 (step 12). To resume from it, run again:"
        " python train.py --name 'a b'\n"
    )
    monkeypatch.setenv("TFDIST_COMMAND", "tfdist run --workers 2 -- python train.py")

    def fail(epoch: int, logs: Any) -> None:
        raise ZeroDivisionError("in a callback")

    failing = keras.callbacks.LambdaCallback(on_epoch_end=fail)
    with pytest.raises(ZeroDivisionError, match="in a callback"):
        resumed.fit(X, Y, callbacks=[failing], **arguments)
    first, _, last = capsys.readouterr().err.splitlines()
    assert first == f"resuming from epoch 4, step 12, of {tmp_path / 'epoch-00003.h5'}"
    assert last.startswith("training stopped by ZeroDivisionError. The last checkpoint is")
    assert last.endswith("run again: tfdist run --workers 2 -- python train.py")
    monkeypatch.setenv("TFDIST_STARTS_AGAIN", "1")  # the launcher does, without a person
    with pytest.raises(ZeroDivisionError, match="in a callback"):
        resumed.fit(X, Y, callbacks=[failing], **arguments)
    assert capsys.readouterr().err.endswith("after epoch 3 (step 12).\n")
    resumed.fit(X, Y, **arguments)
    assert capsys.readouterr().err == first + "\n"
    resumed.fit(X, Y, **FIT)
    assert capsys.readouterr().err == ""


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_files_of_others_in_the_folder_stay(two: Any, tmp_path: Path) -> None:
    weights = keras.callbacks.ModelCheckpoint(
        tmp_path / "epoch-{epoch:05d}.weights.h5", save_weights_only=True
    )
    two[0].fit(X, Y, epochs=5, checkpoint_dir=tmp_path, callbacks=[weights], **FIT)
    theirs = [f"epoch-{epoch:05d}.weights.h5" for epoch in range(1, 6)]
    assert sorted(path.name for path in tmp_path.glob("*.weights.h5")) == theirs


def test_a_crash_in_the_middle_leaves_the_old_one(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = saved.read_bytes()
    model = tfd.distribute(classifier("adam"), mirrored())
    written, original = [], file.read_rows

    def read_rows(*args: Any) -> np.ndarray:
        if len(written) == 3:
            raise MemoryError("no more")
        written.append(args)
        return original(*args)

    monkeypatch.setattr(file, "read_rows", read_rows)
    with pytest.raises(MemoryError):
        model.save_checkpoint(saved)
    assert saved.read_bytes() == before
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]


def test_big_variables_go_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, original = [], file.read_rows

    def read_rows(*args: Any) -> np.ndarray:
        rows = original(*args)
        sizes.append(rows.nbytes)
        return rows

    def build() -> keras.Model:
        model = keras.Sequential([keras.Input((1,)), keras.layers.Embedding(1000, 8)])
        model.compile("sgd", "mse")
        return model

    model = tfd.distribute(build, mirrored())
    model.save_checkpoint(tmp_path / "at once")
    monkeypatch.setattr(file, "BLOCK_BYTES", 1024)
    monkeypatch.setattr(file, "read_rows", read_rows)
    model.save_checkpoint(tmp_path / "in pieces")
    assert sum(sizes) > 32_000
    assert max(sizes) == 1024
    for name in ("at once", "in pieces"):
        other = tfd.distribute(build, strategy_of("central_storage"))
        other.restore_checkpoint(tmp_path / name)
        assert_same_state(model, other)


DTYPES = ["float16", "bfloat16", "float32", "float64", "int8", "uint32", "int64", "bool"]


@pytest.mark.long("default")
@pytest.mark.parametrize("name", ["default", "mirrored", "central_storage"])
def test_whole_values_of_every_dtype(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file, "BLOCK_BYTES", 24)
    strategy = strategy_of(name)
    for dtype in DTYPES:
        for shape in ((10, 3), (7,), (), (0, 3)):
            with strategy.scope():
                variable = keras.Variable(np.zeros(shape), dtype=dtype, trainable=False)
            value = np.arange(np.prod(shape)).reshape(shape).astype(whole_value(variable).dtype)
            assign_whole(variable, value)
            np.testing.assert_array_equal(whole_value(variable), value)
            for copy in strategy.experimental_local_results(variable.value):
                np.testing.assert_array_equal(copy.read_value().numpy(), value)
            with pytest.raises(ValueError, match="must have shape"):
                assign_whole(variable, np.zeros((1, 2, 3)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_checkpoints_of_every_float(dtype: str, tmp_path: Path) -> None:
    def build() -> keras.Model:
        return keras.Sequential([keras.Input((5,)), keras.layers.Dense(4, dtype=dtype)])

    model = tfd.distribute(build, mirrored())
    model.save_checkpoint(tmp_path / "one")
    other = tfd.distribute(build, strategy_of("central_storage"))
    other.restore_checkpoint(tmp_path / "one")
    for value, restored in zip(everything(model).values(), everything(other).values(), strict=True):
        assert restored.dtype == value.dtype
        np.testing.assert_array_equal(restored, value)
    assert np.ptp(everything(other)["model/dense/kernel"]) > 0


def test_the_file_can_be_looked_into(saved: Path) -> None:
    with h5py.File(saved) as file:
        names = {
            dataset.attrs["name"].decode(): dataset.shape for dataset in file["model"].values()
        }
        assert names == {
            "dense/kernel": (5, 4),
            "dense/bias": (4,),
            "dense_1/kernel": (4, 1),
            "dense_1/bias": (1,),
        }
        assert file["optimizer"].attrs["kind"] == b"SGD"
        for dataset in file["model"].values():
            assert dataset.attrs["crc32"] == zlib.crc32(dataset[()].tobytes())
