"""Checkpoints in a store that TensorFlow alone can open: ram:// stands for gs:// and the others."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf
from training_cases import X, Y, assert_same_weights, mirrored

import tfdist_ext as tfd
from tfdist_ext.training.checkpoints.atomic_write import RemotePath, path_of
from tfdist_ext.training.checkpoints.folder import FolderTakenError, claim

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


@pytest.fixture
def remote() -> str:
    return f"ram://bucket-{uuid.uuid4().hex}/run"


def build() -> keras.Model:
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(3), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.05), "mse", metrics=["mae"])
    return model


def train(folder: Any, *callbacks: Any, epochs: int = 5, **options: Any) -> tfd.DistributedModel:
    keras.utils.set_random_seed(7)
    model = tfd.distribute(build, mirrored(2))
    model.fit(
        X, Y, batch_size=16, epochs=epochs, verbose=0, callbacks=[*callbacks],
        checkpoint_dir=folder, **options,
    )  # fmt: skip
    return model


class Fails(keras.callbacks.Callback):
    """At the beginning of the fourth epoch."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == 3:
            raise RuntimeError("the power is cut")


@pytest.mark.parametrize("in_background", [True, False])
def test_a_training_goes_on_as_if_it_had_never_ended(
    tmp_path: Path, remote: str, in_background: bool
) -> None:
    expected = train(tmp_path / "local")
    options = {"checkpoint_async": in_background, "checkpoint_every": 2}
    with pytest.raises(RuntimeError, match="the power is cut"):
        train(remote, Fails(), **options)
    assert [str(path) for path in tfd.finished_checkpoints(remote)][-1].startswith(f"{remote}/")
    found = train(remote, **options)
    assert found.history.epoch == [0, 1, 2, 3, 4]
    assert_same_weights(found, expected)
    names = {name.partition("-")[0] for name in tf.io.gfile.listdir(remote)}
    assert names == {"checkpoints.json", "epoch", "last", "owner"}
    assert len([name for name in tf.io.gfile.listdir(remote) if name.startswith("epoch")]) == 3


def test_one_file(remote: str) -> None:
    model = train(None)
    model.save_checkpoint(f"{remote}/one.h5")
    other = tfd.distribute(build, mirrored(2))
    assert other.restore_checkpoint(f"{remote}/one.h5").step == model.optimizer.iterations
    assert_same_weights(other, model)
    with pytest.raises(tfd.TrainingError, match=r"there is no checkpoint .*run/two\.h5.*one\.h5"):
        other.restore_checkpoint(f"{remote}/two.h5")


def test_a_store_that_tensorflow_does_not_know_is_an_error_at_the_start() -> None:
    with pytest.raises(tfd.TrainingError, match=r"got 's3://bucket/run': .*'s3' not implemented"):
        train("s3://bucket/run")


def test_a_job_that_comes_later_has_the_folder(remote: str) -> None:
    folder = path_of(remote)
    folder.mkdir()
    first, _ = claim(folder)
    second, before = claim(folder)
    assert before == first
    second.check(folder)
    with pytest.raises(FolderTakenError, match="got a newer job in ram://"):
        first.check(folder)


def test_what_cannot_be_copied_there_costs_no_checkpoint(
    remote: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(remote, epochs=2)
    before = tfd.finished_checkpoints(remote)

    def full(*_: Any, **__: Any) -> None:
        raise tf.errors.ResourceExhaustedError(None, None, "the quota is used up")

    monkeypatch.setattr(tf.io.gfile, "copy", full)
    with pytest.raises(tfd.TrainingError, match=r"written to ram://.*quota is used up"):
        train(remote, epochs=3)
    assert tfd.finished_checkpoints(remote) == before
    assert not [name for name in tf.io.gfile.listdir(remote) if "unfinished" in name]


def test_the_names_of_a_path() -> None:
    path = path_of("hdfs:///data/") / "run" / "one.h5"
    assert (str(path), path.name, path.stem) == ("hdfs:///data/run/one.h5", "one.h5", "one")
    assert path.parent == RemotePath("hdfs:///data/run")
    assert path.with_name("two").parent == path.parent
    assert str(path.with_stem("two")) == "hdfs:///data/run/two.h5"
    assert path_of("here/one.h5") == Path("here/one.h5")


def test_a_damaged_file_is_set_aside(tmp_path: Path, remote: str) -> None:
    expected = train(tmp_path / "local")
    train(remote, epochs=3)
    for name in ("epoch-00003.h5", "last-00003.h5"):
        with tf.io.gfile.GFile(f"{remote}/{name}", "rb") as file:
            held = file.read()
        tf.io.gfile.remove(f"{remote}/{name}")  # ram:// does not shorten files
        with tf.io.gfile.GFile(f"{remote}/{name}", "wb") as file:
            file.write(held[:-1000])
    with pytest.warns(UserWarning, match=r"epoch-00003\.h5 is damaged and set aside"):
        found = train(remote)
    assert_same_weights(expected, found)
    assert tf.io.gfile.exists(f"{remote}/epoch-00003.damaged")
