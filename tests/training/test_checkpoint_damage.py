"""Checkpoints with bytes that changed, and jobs that are killed while they write one."""

from __future__ import annotations

import itertools
import os
import re
import resource
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np
import pytest
from real_tasks import PROGRAMS, Tasks
from training_cases import X, Y, assert_same_weights, classifier, mirrored, steps_taken, strategy_of

import tfdist_ext as tfd
from tfdist_ext.training.checkpoints import file
from tfdist_ext.training.checkpoints.file import assign_whole, whole_value
from tfdist_ext.training.checkpoints.saving import finished_checkpoints, training_is_done
from tfdist_ext.training.checkpoints.state import state_of

sys.path.insert(0, str(PROGRAMS))

FIT = {"batch_size": 16, "verbose": 0}


def variables_of(model: tfd.DistributedModel) -> list[Any]:
    return [v for group in state_of(model.keras_model).values() for v in group.values()]


def copies_of(model: tfd.DistributedModel) -> list[np.ndarray]:
    """The value of each variable on each replica."""
    local = model.strategy.experimental_local_results
    return [copy.numpy() for v in variables_of(model) for copy in local(v.value)]


def fill(model: tfd.DistributedModel, value: int) -> None:
    for variable in variables_of(model):
        assign_whole(variable, np.full(variable.shape, value, whole_value(variable).dtype))


@pytest.fixture(scope="module")
def model() -> tfd.DistributedModel:
    """On two replicas, with all that a checkpoint can hold."""
    model = tfd.distribute(classifier("adam"), mirrored())
    model.fit(X, Y, **FIT)
    return model


@pytest.fixture(scope="module")
def saved(model: tfd.DistributedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "saved.h5"
    model.save_checkpoint(path)
    return path


@pytest.fixture(scope="module")
def good(model: tfd.DistributedModel, saved: Path) -> list[np.ndarray]:
    """What the checkpoint holds."""
    return copies_of(model)


def damaged(saved: Path, place: int) -> Path:
    content = bytearray(saved.read_bytes())
    content[place] ^= 0x10
    path = saved.with_name("damaged.h5")
    path.write_bytes(content)
    return path


def middles(saved: Path) -> dict[str, int]:
    """Path in Keras -> place of a byte in the middle of the variable's values in the file."""
    with h5py.File(saved) as file:
        return {
            data.attrs["path"].decode(): data.id.get_offset() + data.id.get_storage_size() // 2
            for group in file.values()
            for data in group.values()
        }


def test_a_flipped_byte_of_any_variable_is_noticed_before_anything_changes(
    model: tfd.DistributedModel,
    saved: Path,
    good: list[np.ndarray],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(file, "BLOCK_BYTES", 16)  # of the biggest, in a block in the middle
    places = middles(saved)
    assert len(places) >= len(variables_of(model)) > 12  # and the seed generator's, if there is one
    fill(model, 7)
    before = copies_of(model)
    for path, place in places.items():
        with pytest.raises(tfd.TrainingError) as raised:
            model.restore_checkpoint(damaged(saved, place))
        raised.match(rf"the values of '{path}' in \S*damaged\.h5 must have the checksum")
        np.testing.assert_equal(copies_of(model), before)
    model.restore_checkpoint(saved)
    np.testing.assert_equal(copies_of(model), good)


def test_no_flipped_byte_changes_what_is_restored(
    model: tfd.DistributedModel, saved: Path, good: list[np.ndarray]
) -> None:
    refused = []
    fill(model, 7)
    before = copies_of(model)
    for place in range(0, saved.stat().st_size, 131):
        path = damaged(saved, place)
        try:
            progress = model.restore_checkpoint(path)
        except tfd.TrainingError as error:
            refused.append(str(error))
            np.testing.assert_equal(copies_of(model), before)
        else:  # between what is in use
            np.testing.assert_equal(copies_of(model), good)
            assert (progress.epoch, progress.step) == (1, 4)
            fill(model, 7)
    assert len(refused) > 50
    assert any("cannot be read" in message for message in refused)


def test_files_without_checksums_are_read(
    model: tfd.DistributedModel, saved: Path, good: list[np.ndarray], tmp_path: Path
) -> None:
    """Those of version 1, whose names have no fixed length."""

    def texts(attributes: Any) -> dict[str, Any]:
        found = {key: value for key, value in attributes.items() if key != "crc32"}
        return {k: v.decode() if isinstance(v, bytes) else v for k, v in found.items()}

    with h5py.File(saved) as new, h5py.File(tmp_path / "old.h5", "w") as old:
        old.attrs.update({**texts(new.attrs), "version": 1})
        for name, group in new.items():
            old.create_group(name).attrs.update({"kind": "", **texts(group.attrs)})
            for place, data in group.items():
                old[name].create_dataset(place, data=data[()]).attrs.update(texts(data.attrs))
    fill(model, 7)
    progress = model.restore_checkpoint(tmp_path / "old.h5")
    np.testing.assert_equal(copies_of(model), good)
    assert (progress.epoch, progress.step) == (1, 4)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[next(iter(middles(path).values()))] ^= 1
    path.write_bytes(content)


def another_format(path: Path) -> None:
    path.unlink()
    with h5py.File(path, "w") as other:
        other["x"] = 1.0


DAMAGES: dict[str, Callable[[Path], object]] = {
    "flipped": flip,
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-1000]),
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_text("no checkpoint"),
    "another format": another_format,
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[tfd.DistributedModel, Path]:
    """A model after 4 epochs, and the folder of the same training after 3."""
    folder = tmp_path_factory.mktemp("undisturbed")
    models = []
    for epochs in (4, 3):
        keras.utils.set_random_seed(3)
        models.append(tfd.distribute(classifier("adam"), mirrored()))
        models[-1].fit(X, Y, epochs=epochs, checkpoint_dir=folder / str(epochs), **FIT)
    return models[0], folder / "3"


@pytest.mark.parametrize("how", DAMAGES)
def test_a_training_resumes_from_the_newest_whole_checkpoint(
    how: str, undisturbed: tuple[tfd.DistributedModel, Path], tmp_path: Path
) -> None:
    whole, trained = undisturbed
    folder = shutil.copytree(trained, tmp_path / "D")
    # As where the disk has damaged the last two: the state at the end is one more file.
    for name in ("epoch-00003.h5", "last-00003.h5", "epoch-00002.h5")[: 3 if how == "cut" else 2]:
        DAMAGES[how](folder / name)
    held = (folder / "epoch-00003.h5").read_bytes()
    model = tfd.distribute(classifier("adam"), mirrored())
    with pytest.warns(
        UserWarning, match=r"epoch-00003\.h5 is damaged and set aside as epoch-00003"
    ):
        history = model.fit(X, Y, epochs=4, checkpoint_dir=folder, **FIT)
    assert history.epoch == [0, 1, 2, 3]
    assert_same_weights(whole, model)
    assert (folder / "epoch-00003.damaged").read_bytes() == held
    assert finished_checkpoints(folder)[-1].name == "epoch-00004.h5"


def test_without_a_whole_checkpoint_nothing_is_changed(
    undisturbed: tuple[tfd.DistributedModel, Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(undisturbed[1], tmp_path / "D")
    for path in folder.glob("*.h5"):
        path.write_bytes(b"")
    before = sorted(path.name for path in folder.glob("*.h5*"))
    model = tfd.distribute(classifier("adam"), mirrored())
    for _ in range(2):  # a restart refuses as well
        with pytest.raises(tfd.TrainingError, match=r"no checkpoint of this training .*Move these"):
            model.fit(X, Y, epochs=4, checkpoint_dir=folder, **FIT)
        assert sorted(path.name for path in folder.glob("*.h5*")) == before
    for path in folder.glob("*.h5"):
        path.unlink()
    with pytest.raises(tfd.TrainingError, match=r"there is no checkpoint .*epoch-00003\.h5"):
        model.fit(X, Y, epochs=5, checkpoint_dir=folder, **FIT)


def test_a_complete_training_whose_state_at_the_end_is_damaged_ends_again(
    undisturbed: tuple[tfd.DistributedModel, Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(undisturbed[1], tmp_path / "D")
    expected = tfd.distribute(classifier("adam"), mirrored())
    expected.restore_checkpoint(folder / "last-00003.h5")
    flip(folder / "last-00003.h5")
    model = tfd.distribute(classifier("adam"), mirrored())
    with pytest.warns(UserWarning, match=r"last-00003\.h5 is damaged and set aside"):
        history = model.fit(X, Y, epochs=3, checkpoint_dir=folder, **FIT)
    assert history.epoch == [0, 1, 2]
    assert_same_weights(expected, model, tolerance=0)
    assert training_is_done(folder)


def test_a_damaged_checkpoint_in_the_middle_of_an_epoch(
    undisturbed: tuple[tfd.DistributedModel, Path], tmp_path: Path
) -> None:
    def cut(epoch: int, logs: Any) -> None:
        if epoch == 2:
            raise RuntimeError("the power is cut")

    fit = {"epochs": 4, "checkpoint_dir": tmp_path, "checkpoint_every": 3, **FIT}
    keras.utils.set_random_seed(3)
    model = tfd.distribute(classifier("adam"), mirrored())
    with pytest.raises(RuntimeError, match="the power is cut"):
        model.fit(X, Y, callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=cut)], **fit)
    newest = finished_checkpoints(tmp_path)[-1]
    assert "-batch-" in newest.name
    flip(newest)
    resumed = tfd.distribute(classifier("adam"), mirrored())
    with pytest.warns(UserWarning, match=rf"{newest.name} is damaged and set aside"):
        resumed.fit(X, Y, **fit)
    assert_same_weights(undisturbed[0], resumed)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tasks]:
    """Jobs that were killed for sure in the middle of a checkpoint, and one that is paused."""
    folder = tmp_path_factory.mktemp("killed")
    env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"}
    program = [sys.executable, str(PROGRAMS / "checkpoint_killed.py"), str(folder)]
    jobs = Tasks({name: ([*program, name], env) for name in ("one", "fit", "paused")}, folder)
    try:
        jobs.start("one", "fit", "paused")
        for name in ("one", "fit"):
            jobs.wait_for(name, "INSIDE")
            jobs.signal(name, signal.SIGKILL)
            assert jobs.status(name) == -signal.SIGKILL
        jobs.wait_for("paused", "PAUSED")
        yield jobs
    finally:
        jobs.kill()


@pytest.fixture
def killed(jobs: Tasks) -> Path:
    return jobs.folder


@pytest.mark.long
def test_a_killed_save_leaves_the_checkpoint_before(killed: Path) -> None:
    import mlp

    path, unfinished = killed / "one.h5", killed / ".one.h5.unfinished"
    assert unfinished.exists()
    assert path.read_bytes() == (killed / "copy.h5").read_bytes()
    model = tfd.distribute(mlp.build, mirrored())
    progress = model.restore_checkpoint(path)
    assert (progress.epoch, progress.step) == (1, 8)
    model.fit(*mlp.data(), batch_size=mlp.BATCH, verbose=0)
    model.save_checkpoint(path)
    assert not unfinished.exists()
    other = tfd.distribute(mlp.build, strategy_of("central_storage"))
    assert other.restore_checkpoint(path).step == 16
    assert_same_weights(model, other, tolerance=0)


def test_a_fit_that_was_killed_while_it_saved_goes_on(killed: Path, tmp_path: Path) -> None:
    import mlp

    folder = killed / "D"
    files = ["epoch-00001.h5", "epoch-00002.h5"]
    assert [path.name for path in finished_checkpoints(folder)] == files
    on_disk = sorted(path.name for path in folder.iterdir())
    unfinished = ".epoch-00003.h5.00001.unfinished"
    assert on_disk == [unfinished, "checkpoints.json", *files, "owner-00001.json"]
    assert not training_is_done(folder)
    fit = {"batch_size": mlp.BATCH, "epochs": 4, "verbose": 0}
    keras.utils.set_random_seed(3)
    whole = tfd.distribute(mlp.build, mirrored())
    whole.fit(*mlp.data(), checkpoint_dir=tmp_path / "whole", **fit)
    resumed = tfd.distribute(mlp.build, mirrored())
    assert resumed.fit(*mlp.data(), checkpoint_dir=folder, **fit).epoch == [0, 1, 2, 3]
    assert_same_weights(whole, resumed)
    assert steps_taken(resumed) == 4 * 8
    assert not list(folder.glob(".*"))
    assert training_is_done(folder)


def test_a_paused_job_that_wakes_leaves_the_training_of_its_successor(jobs: Tasks) -> None:
    import mlp

    folder = jobs.folder / "paused"
    model = tfd.distribute(mlp.build, mirrored())
    with pytest.warns(UserWarning, match="another job has .*, process .* takes the folder over"):
        history = model.fit(
            *mlp.data(), batch_size=mlp.BATCH, epochs=4, verbose=0, checkpoint_dir=folder
        )
    assert history.epoch == [0, 1, 2, 3]
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert {"epoch-00004.h5", "last-00004.h5"} <= before.keys()
    jobs.signal("paused", signal.SIGCONT)
    assert jobs.status("paused") == 1
    log = jobs.log("paused")
    taken = rf"got a newer job in {folder}: host {socket.gethostname()}, process"
    assert re.search(rf"FolderTakenError: .*{taken} {os.getpid()}, since 20", log)
    assert "To resume" not in log
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert training_is_done(folder)
    other = tfd.distribute(mlp.build, strategy_of("central_storage"))
    assert other.restore_checkpoint(folder / "last-00004.h5").epoch == 4
    assert_same_weights(model, other, tolerance=0)


@pytest.mark.long
def test_with_a_lost_index_the_numbers_are_those_of_one_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def copy(epoch: int, logs: Any) -> None:
        shutil.copytree(tmp_path / "whole", tmp_path / str(epoch))

    arguments = {"epochs": 4, **FIT}
    whole, resumed = (tfd.distribute(classifier("adam"), mirrored()) for _ in range(2))
    copies = [keras.callbacks.LambdaCallback(on_epoch_begin=copy)]
    at_once = {"callbacks": copies, "checkpoint_async": False}
    whole.fit(X, Y, checkpoint_dir=tmp_path / "whole", **at_once, **arguments)
    damages: dict[str, Callable[[Path], object]] = {
        "gone": Path.unlink,
        "cut": lambda index: index.write_bytes(index.read_bytes()[:200]),
        "of the epoch before": lambda index: shutil.copy(tmp_path / "2" / index.name, index),
        "gone, and the newest is damaged": lambda index: (
            index.unlink(),
            flip(index.with_name("epoch-00003.h5")),
        ),
    }
    for name, damage in damages.items():
        folder = shutil.copytree(tmp_path / "3", tmp_path / name)
        damage(folder / "checkpoints.json")
        newest = (folder / "epoch-00003.h5").read_bytes()
        said = r"checkpoints\.json is .*rebuilt from epoch-00001\.h5"
        with pytest.warns(UserWarning, match=said):
            resumed.fit(X, Y, checkpoint_dir=folder, **arguments)
        epoch = 3 if "damaged" in name else 4
        assert f"resuming from epoch {epoch}, " in capsys.readouterr().err
        assert_same_weights(whole, resumed)
        kept = "epoch-00003.damaged" if "damaged" in name else "epoch-00003.h5"
        assert (folder / kept).read_bytes() == newest


@pytest.mark.long
def test_a_full_disk_leaves_the_checkpoints_before(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A limit on the size of files stands for the disk's: the system refuses the write alike."""
    model = tfd.distribute(classifier("adam"), mirrored())
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(epoch: int, logs: Any) -> None:
        if epoch != 2:
            return
        while len(tfd.finished_checkpoints(tmp_path)) < 2:  # it is written in the background
            time.sleep(0.01)
        size = (tmp_path / "epoch-00001.h5").stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, before[1]))

    full = keras.callbacks.LambdaCallback(on_epoch_end=fill)
    arguments = {"epochs": 4, "checkpoint_dir": tmp_path, **FIT}
    try:
        with pytest.raises(tfd.TrainingError) as raised:
            model.fit(X, Y, callbacks=[full], **arguments)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    raised.match(r"checkpoint_dir must be writable, and epoch-00003\.h5 could not be written")
    raised.match(r"File too large.* the last complete checkpoint, epoch-00002\.h5, stays")
    assert "Traceback" not in capfd.readouterr().err  # of HDF5's objects, as they are collected
    names = ["checkpoints.json", "epoch-00001.h5", "epoch-00002.h5", "owner-00001.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    history = tfd.distribute(classifier("adam"), mirrored()).fit(X, Y, **arguments)
    assert history.epoch == [0, 1, 2, 3]


@pytest.mark.parametrize("part", [0.02, 0.3, 0.6, 0.99])
def test_a_full_disk_is_an_error_wherever_it_is_noticed(
    part: float, model: tfd.DistributedModel, saved: Path, good: list[np.ndarray], tmp_path: Path
) -> None:
    held = saved.read_bytes()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(len(held) * part), before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            model.save_checkpoint(saved)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert saved.read_bytes() == held
    assert not list(saved.parent.glob(".*"))
    fill(model, 7)
    model.restore_checkpoint(saved)
    np.testing.assert_equal(copies_of(model), good)


def test_a_disk_that_fails_while_it_is_written_to(
    model: tfd.DistributedModel, saved: Path, good: list[np.ndarray], monkeypatch: Any
) -> None:
    """What is written goes to the disk in pieces; the disk may refuse any of them."""
    held, ordinary, calls = saved.read_bytes(), os.fsync, itertools.count(1)

    def failing(descriptor: int) -> None:
        if next(calls) == 3:
            raise OSError(5, "Input/output error")
        ordinary(descriptor)

    monkeypatch.setattr(file, "_SYNC_BYTES", 1000)
    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(OSError, match=r"Input/output error: .*unfinished"):
        model.save_checkpoint(saved)
    assert next(calls) == 4  # nothing was written after it
    assert saved.read_bytes() == held
    model.save_checkpoint(saved)
    assert next(calls) > 8  # a file that is synced at its end alone has two
    fill(model, 7)
    model.restore_checkpoint(saved)
    np.testing.assert_equal(copies_of(model), good)
