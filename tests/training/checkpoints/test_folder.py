"""A checkpoint folder between jobs: its list of files, its owner, and damaged files."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tfdist_ext as tfd
from tfdist_ext.training.checkpoints.folder import (
    CheckpointFolder,
    FolderTakenError,
)
from tfdist_ext.training.checkpoints.format import Progress, encode_checkpoint

EPOCHS = 5


class Job:
    """A fit as its folder sees it: checkpoints of one array, of 10 steps an epoch."""

    def __init__(self, path: Path):
        self.folder = CheckpointFolder(str(path))
        self.folder.find_newest()
        self.folder.take()
        self.epoch = self.folder.progress.epoch

    def train(self, *, until: int) -> Job:
        while self.epoch < until:
            self.save(self.epoch + 1)
        return self

    def save(self, epoch: int, batches: int = 0) -> None:
        self.folder.write(*content_of(epoch, batches))
        self.epoch = epoch

    def end(self) -> None:
        self.folder.finish(EPOCHS)


def content_of(epoch: int, batches: int = 0, report: Any = lambda: None) -> Any:
    progress = Progress(epoch, 10 * epoch + batches, seed=7, batches=batches)
    return progress, encode_checkpoint(progress, {"model/w": np.full(9, epoch)}, report)


def epochs_in(folder: Path) -> list[int]:
    return [int(path.name[6:11]) for path in tfd.finished_checkpoints(folder)]


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def file(epoch: int) -> str:
    return f"epoch-{epoch:05d}.safetensors"


def test_the_last_three_stay_in_the_order_of_the_training(tmp_path: Path) -> None:
    (tmp_path / "epoch-00001.weights.h5").write_bytes(b"of a callback")
    job = Job(tmp_path)
    job.save(1)
    job.save(1, batches=120)
    job.save(1, batches=30)
    names = [path.name for path in tfd.finished_checkpoints(tmp_path)]
    middle = "epoch-00001-batch-{:08d}.safetensors"
    assert names == [file(1), middle.format(30), middle.format(120)]
    job.train(until=4)
    assert epochs_in(tmp_path) == [2, 3, 4]
    assert not tfd.training_is_done(tmp_path)
    job.train(until=5).end()
    assert tfd.training_is_done(tmp_path)
    names = ["epoch-00001.weights.h5", *map(file, (3, 4, 5)), "owner.json"]
    assert sorted(content(tmp_path)) == names
    assert tfd.finished_checkpoints(tmp_path / "nowhere") == []
    assert not tfd.training_is_done(tmp_path / "nowhere")


def test_an_older_job_names_the_newer_one_and_changes_nothing(tmp_path: Path) -> None:
    older = Job(tmp_path).train(until=3)
    newer = Job(tmp_path)
    assert newer.epoch == 3
    with pytest.raises(FolderTakenError):  # the newer one has written nothing yet
        older.save(4)
    newer.train(until=5).end()
    before = content(tmp_path)
    pattern = rf"Another job writes to {tmp_path}: host {socket.gethostname()}, process"
    for change in (lambda: older.save(4), older.end):
        with pytest.raises(FolderTakenError, match=rf"{pattern} {os.getpid()}, since 20\d\d-"):
            change()
    assert content(tmp_path) == before
    assert tfd.training_is_done(tmp_path)


def test_damaged_checkpoints_are_not_kept_in_place_of_good_ones(tmp_path: Path) -> None:
    Job(tmp_path).train(until=5)
    for epoch in (4, 5):
        (tmp_path / file(epoch)).write_bytes(b"damaged")
    with pytest.warns(UserWarning, match="not a complete checkpoint"):
        job = Job(tmp_path)
    assert job.epoch == 3
    job.save(3, batches=1)
    job.save(3, batches=2)
    assert sorted(path.name for path in tfd.finished_checkpoints(tmp_path)) == [
        "epoch-00003-batch-00000001.safetensors",
        "epoch-00003-batch-00000002.safetensors",
        *map(file, (3, 4, 5)),
    ]


def test_a_job_that_is_paused_while_it_writes_destroys_nothing(tmp_path: Path) -> None:
    older = Job(tmp_path).train(until=1)
    before: list[dict[str, bytes]] = []

    def paused() -> None:
        (unfinished,) = tmp_path.glob(".epoch-00002*")
        Job(tmp_path).train(until=2)
        assert not unfinished.exists()
        before.append(content(tmp_path))

    with pytest.raises(FolderTakenError):
        older.folder.write(*content_of(2, report=paused))
    assert [content(tmp_path)] == before


def test_a_lost_or_damaged_owner_file_costs_nothing(tmp_path: Path) -> None:
    job = Job(tmp_path).train(until=2)
    for held in (b"", b'{"id": "a"}', b"[]"):
        (tmp_path / "owner.json").write_bytes(held)
        assert not tfd.training_is_done(tmp_path)
        job.save(job.epoch + 1)
    (tmp_path / "owner.json").unlink()
    assert Job(tmp_path).epoch == 5


def test_a_job_resumes_from_the_newest_complete_checkpoint(tmp_path: Path) -> None:
    Job(tmp_path).train(until=4)
    newest, complete = tmp_path / file(4), (tmp_path / file(4)).read_bytes()
    newest.write_bytes(complete[:-1])
    (tmp_path / f".{file(5)}.{'0' * 32}.unfinished").write_bytes(b"of a job that was killed")
    words = r"epoch-00004\.safetensors is not a complete.*The training resumes from .*epoch-00003"
    with pytest.warns(UserWarning, match=words):
        job = Job(tmp_path)
    assert job.epoch == 3
    assert not list(tmp_path.glob(".*"))
    job.train(until=5).end()
    assert newest.read_bytes() == complete  # written again
    (tmp_path / file(5)).write_bytes(b"")  # the training is not complete any more
    with pytest.warns(UserWarning, match=r"resumes from .*epoch-00004"):
        assert Job(tmp_path).epoch == 4


def test_without_a_complete_checkpoint_nothing_is_changed(tmp_path: Path) -> None:
    Job(tmp_path).train(until=3)
    for path in tfd.finished_checkpoints(tmp_path):
        path.write_bytes(b"")
    for _ in range(2):  # a restart refuses as well
        with pytest.raises(tfd.TrainingError, match=r"has no complete checkpoint: .*Move these"):
            Job(tmp_path)
        assert epochs_in(tmp_path) == [1, 2, 3]
    for path in tfd.finished_checkpoints(tmp_path):
        path.unlink()
    assert Job(tmp_path).epoch == 0


def test_a_checkpoint_that_cannot_be_read_is_not_damaged(tmp_path: Path, monkeypatch: Any) -> None:
    """The disk may work again; a restart must not go back by an epoch."""

    def fails(path: str, mode: str = "rb") -> Any:
        if mode == "wb":
            return open(path, mode)
        raise OSError(5, "Input/output error")

    Job(tmp_path).train(until=3)
    before = sorted(tmp_path.glob("epoch-*"))
    with monkeypatch.context() as patch:
        patch.setattr("tfdist_ext.training.checkpoints.format.open_file", fails)
        with pytest.raises(tfd.TrainingError, match="cannot be read: Input/output error"):
            Job(tmp_path)
    assert sorted(tmp_path.glob("epoch-*")) == before
    assert Job(tmp_path).epoch == 3
