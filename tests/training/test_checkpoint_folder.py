"""A checkpoint folder between jobs: one writer, and an index that the files can replace."""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import threading
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

import tfdist_ext as tfd
from tfdist_ext.training.checkpoints import folder
from tfdist_ext.training.checkpoints.file import CheckpointFile, write_checkpoint
from tfdist_ext.training.checkpoints.folder import (
    CheckpointFolder,
    FolderTakenError,
    Index,
    Owner,
    Progress,
    claim,
    newest_owner,
)
from tfdist_ext.training.checkpoints.saving import finished_checkpoints, training_is_done

EPOCHS = 5


class Job:
    """A fit, as its folder sees it: checkpoints without variables, of 10 steps an epoch."""

    def __init__(self, path: Path):
        self.folder = CheckpointFolder(path)
        self.folder.open(EPOCHS)

    @property
    def epoch(self) -> int:
        return next(reversed(self.folder.index.checkpoints.values()), Progress()).epoch

    def train(self, *, until: int) -> Job:
        while self.epoch < until:
            self.save(self.epoch + 1)
        return self

    def save(self, epoch: int, batches: int = 0) -> None:
        middle = f"-batch-{batches:08d}" if batches else ""
        progress = Progress(epoch, 10 * epoch + batches, seed=7, batches=batches)
        self._write(f"epoch-{epoch:05d}{middle}.h5", progress)
        self.folder.add(progress)

    def end(self) -> Job:
        self._write(
            f"last-{self.epoch:05d}.h5", Progress(self.epoch, 10 * self.epoch), epochs_when_done=5
        )
        self.folder.add_last(EPOCHS, written=True)
        self.folder.close()
        return self

    def _write(self, name: str, progress: Progress, **more: int) -> None:
        attributes = {**asdict(progress), **self.folder.attributes, **more}
        path = self.folder.path / name
        write_checkpoint(path, {}, {}, attributes, self.folder.new_file)


def epochs_in(folder: Path) -> list[int]:
    return [Index.read(folder).checkpoints[p.name].epoch for p in finished_checkpoints(folder)]


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def jobs_of(folder: Path) -> set[int]:
    """The generations of the jobs that wrote the checkpoints of an index."""
    found = set()
    for path in finished_checkpoints(folder):
        with CheckpointFile(path) as file:
            found.add(file.number("generation"))
    return found


# A job that is stopped and woken


def test_an_older_job_names_the_newer_one_and_changes_nothing(tmp_path: Path) -> None:
    older = Job(tmp_path).train(until=3)
    newer = Job(tmp_path).train(until=5).end()
    before = content(tmp_path)
    pattern = rf"got a newer job in {tmp_path}: host {socket.gethostname()}, process"
    for change in (lambda: older.save(4), older.folder.write_index, older.end):
        with pytest.raises(FolderTakenError, match=rf"{pattern} {os.getpid()}, since 20\d\d-"):
            change()
    older.folder.close()
    assert content(tmp_path) == before
    assert epochs_in(tmp_path) == [3, 4, 5]
    assert training_is_done(tmp_path)
    assert newer.folder.index == Index.read(tmp_path)


def test_a_newer_job_that_has_written_nothing_yet_is_not_disturbed(tmp_path: Path) -> None:
    older = Job(tmp_path).train(until=3)
    newer = Job(tmp_path)
    with pytest.raises(FolderTakenError):
        older.save(4)
    newer.train(until=4)
    assert epochs_in(tmp_path) == [2, 3, 4]
    assert jobs_of(tmp_path) == {1, 2}


def stopped_before(function: str, module: Any, monkeypatch: Any, meanwhile: Any) -> None:
    """The next call of a function comes when something else has happened."""
    original = getattr(module, function)

    def late(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.setattr(module, function, original)
        meanwhile()
        return original(*args, **kwargs)

    monkeypatch.setattr(module, function, late)


@pytest.mark.parametrize(
    ("function", "module"),
    [
        pytest.param("to_disk", folder, id="a checkpoint is written"),
        pytest.param("moved_if_free", folder, id="it is checked, and not yet renamed"),
        pytest.param("write", Index, id="the index is checked, and not yet written"),
    ],
)
@pytest.mark.parametrize("until", [4, 5])
@pytest.mark.filterwarnings("ignore:.*is older than epoch-00004.h5")  # which the older job wrote
def test_a_job_that_is_stopped_after_its_check_destroys_nothing(
    function: str, module: Any, until: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = Job(tmp_path).train(until=3)
    newer: dict[str, bytes] = {}

    def meanwhile() -> None:
        job = Job(tmp_path).train(until=until)
        if until == EPOCHS:
            job.end()
        newer.update(content(tmp_path))

    stopped_before(function, module, monkeypatch, meanwhile)
    with pytest.raises(FolderTakenError):
        older.train(until=5)
    after = content(tmp_path)
    assert {name: after.get(name) for name in newer if name.endswith(".h5")} == {
        name: held for name, held in newer.items() if name.endswith(".h5")
    }
    assert epochs_in(tmp_path) == [2, 3, 4] if until == 4 else [3, 4, 5]
    assert training_is_done(tmp_path) is (until == EPOCHS)
    if function != "write":  # where both wrote one epoch, it is the newer job's that counts
        assert jobs_of(tmp_path) == {1, 2}


def test_two_jobs_never_write_into_one_file(tmp_path: Path) -> None:
    older = Job(tmp_path).train(until=1)
    writing = older.folder.new_file(tmp_path / "epoch-00002.h5")
    unfinished = writing.__enter__()
    unfinished.write_bytes(b"half of it")
    Job(tmp_path).train(until=2)
    assert not unfinished.exists()
    unfinished.write_bytes(b"the rest")
    with pytest.raises(FolderTakenError):
        writing.__exit__(None, None, None)
    names = ["checkpoints.json", "epoch-00001.h5", "epoch-00002.h5", "owner-00002.json"]
    assert sorted(content(tmp_path)) == names
    assert jobs_of(tmp_path) == {1, 2}


def test_a_folder_that_was_emptied_is_filled_again(tmp_path: Path) -> None:
    job = Job(tmp_path / "D").train(until=3)
    shutil.rmtree(tmp_path / "D")
    job.save(4)
    assert (tmp_path / "D" / "epoch-00004.h5").exists()
    shutil.rmtree(tmp_path / "D")
    Job(tmp_path / "D").train(until=1)  # of the same generation
    with pytest.raises(FolderTakenError):
        job.save(5)
    assert epochs_in(tmp_path / "D") == [1]


# Who has the folder


def test_jobs_that_start_at_once_have_generations_of_their_own(tmp_path: Path) -> None:
    owners: list[Owner] = []
    start = threading.Barrier(8)

    def run() -> None:
        start.wait()
        owners.append(claim(tmp_path)[0])

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # One that sees a newer job at once tries again, and leaves a gap.
    assert len({owner.generation for owner in owners}) == 8
    newest = newest_owner(tmp_path)
    assert newest is not None
    assert newest.generation == max(owner.generation for owner in owners)
    for owner in owners:
        if owner.id != newest.id:
            with pytest.raises(FolderTakenError):
                owner.check(tmp_path)
    newest.check(tmp_path)


def test_a_file_system_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    older = Job(tmp_path).train(until=4)
    Job(tmp_path).train(until=5).end()
    with pytest.raises(FolderTakenError):
        older.save(5)
    assert epochs_in(tmp_path) == [3, 4, 5]
    assert training_is_done(tmp_path)
    assert not [name for name in content(tmp_path) if "unfinished" in name]


def of_another_process(**changes: Any) -> Owner:
    boot, container = folder._machine()
    parent = os.getppid()
    here = Owner(
        1,
        "id",
        socket.gethostname(),
        f"{boot} {container}",
        parent,
        folder._started(parent),
        1.7e9,
    )
    return replace(here, **changes)


@pytest.mark.parametrize(
    ("changes", "running"),
    [
        pytest.param({}, True, id="alive, or stopped"),
        pytest.param({"ended": True}, False, id="ended"),
        pytest.param({"pid": 2**22 + 1}, False, id="killed"),
        pytest.param({"started": "1"}, False, id="its pid is used again"),
        pytest.param({"pid": os.getpid()}, False, id="an earlier fit of this process"),
        pytest.param({"machine": "boot pid:[1]"}, False, id="the machine has restarted"),
        pytest.param({"host": "far", "machine": "boot pid:[1]"}, True, id="another machine"),
    ],
)
def test_the_second_job_says_at_its_start_that_there_is_another(
    changes: dict[str, Any], running: bool, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    owner = of_another_process(**changes)
    folder._create(tmp_path, owner)
    Job(tmp_path).train(until=1)
    said = [str(warning.message) for warning in recwarn]
    assert len(said) == running
    if running:
        assert f"another job has {tmp_path}: host {owner.host}, process {owner.pid}," in said[0]
        assert "This job takes the folder over" in said[0]


def test_an_owner_whose_record_cannot_be_read(tmp_path: Path) -> None:
    job = Job(tmp_path).train(until=2)
    (tmp_path / "owner-00001.json").write_text('{"gener')
    job.train(until=3)
    (tmp_path / "owner-00002.json").write_text("")
    with pytest.raises(FolderTakenError, match=r"a job whose record owner-00002\.json cannot be"):
        job.save(4)
    Job(tmp_path).train(until=5).end()
    assert epochs_in(tmp_path) == [3, 4, 5]
    assert (tmp_path / "owner-00003.json").exists()


# An index that is lost


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    folder = tmp_path / "D"
    Job(folder).train(until=4)
    return folder


@pytest.fixture
def ended(tmp_path: Path) -> Path:
    folder = tmp_path / "ended"
    Job(folder).train(until=5).end()
    return folder


def another(folder: Path) -> Path:
    """Another training, in a folder beside this one."""
    Job(folder.parent / "another").train(until=2)
    return folder.parent / "another"


def change_index(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        index = folder / "checkpoints.json"
        index.write_bytes(change(index.read_bytes()))

    return damage


def index_of_another(folder: Path) -> None:
    shutil.copy(another(folder) / "checkpoints.json", folder)


def and_no_owner(damage: Callable[[Path], None]) -> Callable[[Path], None]:
    def both(folder: Path) -> None:
        damage(folder)
        (folder / "owner-00001.json").unlink()

    return both


def no_index(folder: Path) -> None:
    (folder / "checkpoints.json").unlink()


def older_index(folder: Path) -> None:
    Job(folder.parent / "copy").train(until=3)
    index = Index.read(folder.parent / "copy")
    names = {**index.checkpoints, "epoch-00000.h5": Progress()}
    training = Index.read(folder).training
    replace(index, checkpoints=names, training=training).write(folder)


DAMAGES = [
    pytest.param(no_index, "is missing", id="gone"),
    pytest.param(and_no_owner(no_index), "is missing", id="gone, and the owner too"),
    pytest.param(change_index(lambda _: b""), "is damaged", id="empty"),
    pytest.param(change_index(lambda _: b"\xff\xfe garbage"), "is damaged", id="garbage"),
    pytest.param(change_index(lambda _: b"[]"), "is damaged", id="a list"),
    pytest.param(change_index(lambda _: b'{"format": "x"}'), "is damaged", id="another format"),
    pytest.param(change_index(lambda text: text[: len(text) // 2]), "is damaged", id="cut"),
    pytest.param(
        change_index(lambda text: text.replace(b'"seed": 7', b'"seed": 6')),
        "is damaged .its checksum is wrong",
        id="another seed",
    ),
    pytest.param(older_index, "is older than epoch-00004.h5", id="older"),
    pytest.param(index_of_another, "is of another training", id="of another training"),
    pytest.param(
        and_no_owner(index_of_another), "(does not describe|names no file)", id="of nobody knows"
    ),
]


@pytest.mark.parametrize(("damage", "words"), DAMAGES)
def test_an_index_is_made_again_from_the_files(
    damage: Callable[[Path], None], words: str, trained: Path
) -> None:
    expected = Index.read(trained)
    files = {name: held for name, held in content(trained).items() if name.endswith(".h5")}
    damage(trained)
    if "older" not in words and "of another" not in words and "|" not in words:
        assert finished_checkpoints(trained) == [trained / name for name in expected.checkpoints]
    with pytest.warns(UserWarning, match=rf"checkpoints\.json {words}.*rebuilt from epoch-0000"):
        job = Job(trained)
    assert job.folder.index.checkpoints == expected.checkpoints
    assert job.folder.index.training == expected.training
    assert {name: content(trained)[name] for name in files} == files
    job.train(until=5).end()
    assert epochs_in(trained) == [3, 4, 5]
    assert training_is_done(trained)


@pytest.mark.parametrize(("damage", "words"), DAMAGES)
def test_a_complete_training_stays_complete(
    damage: Callable[[Path], None], words: str, ended: Path
) -> None:
    expected = Index.read(ended)
    files = {name: held for name, held in content(ended).items() if name.endswith(".h5")}
    damage(ended)
    with pytest.warns(UserWarning, match=r"checkpoints\.json .*rebuilt from epoch-0000"):
        job = Job(ended)
    assert job.folder.last_state(EPOCHS) == "last-00005.h5"
    assert job.folder.index.checkpoints == expected.checkpoints
    assert training_is_done(ended)
    assert {name: content(ended)[name] for name in files} == files
    assert Index.stored(ended)[1] is None


def test_no_flipped_or_missing_byte_of_an_index_changes_what_it_says(trained: Path) -> None:
    expected, index = Index.read(trained).checkpoints, trained / "checkpoints.json"
    whole = index.read_bytes()
    for place in range(0, len(whole), 17):
        flipped = bytearray(whole)
        flipped[place] ^= 0x04
        for text in (bytes(flipped), whole[:place]):
            index.write_bytes(text)
            assert Index.read(trained).checkpoints == expected


def test_damaged_files_are_named_and_set_aside(trained: Path) -> None:
    newest = trained / "epoch-00004.h5"
    newest.write_bytes(newest.read_bytes()[:500])
    (trained / "epoch-00002.h5").write_bytes(b"")
    (trained / "checkpoints.json").unlink()
    damaged = {name: content(trained)[name] for name in ("epoch-00002.h5", "epoch-00004.h5")}
    with pytest.warns(
        UserWarning, match=r"from epoch-00003\.h5; epoch-00002.h5 is damaged .*epoch-00004.h5 is"
    ):
        job = Job(trained)
    job.train(until=5).end()
    aside = {name: content(trained)[name.replace(".h5", ".damaged")] for name in damaged}
    assert aside == damaged
    assert epochs_in(trained) == [3, 4, 5]
    assert "epoch-00004.h5" in Index.read(trained).checkpoints
    (trained / "checkpoints.json").unlink()
    for name in Index.read(trained).checkpoints:
        (trained / name).write_bytes(b"")
    (trained / "last-00005.h5").write_bytes(b"")
    before = {name: held for name, held in content(trained).items() if name.endswith(".h5")}
    with pytest.raises(
        tfd.TrainingError, match=r"no checkpoint of this training that can be read: .*Move these"
    ):
        Job(trained)
    assert {name: content(trained)[name] for name in before} == before


def test_files_of_two_trainings(trained: Path) -> None:
    other = another(trained)
    shutil.copy(other / "epoch-00001.h5", trained)
    (trained / "checkpoints.json").unlink()
    with pytest.warns(UserWarning, match=r"; epoch-00001\.h5 of another training left alone"):
        job = Job(trained)
    job.train(until=5).end()
    assert epochs_in(trained) == [3, 4, 5]
    kept = (trained / "epoch-00001.h5").read_bytes()
    assert kept == (other / "epoch-00001.h5").read_bytes()
    (trained / "checkpoints.json").unlink()
    (trained / "owner-00002.json").unlink()
    before = content(trained)
    with pytest.raises(tfd.TrainingError, match=r"one training, got those of 2: \(epoch-00001\.h5"):
        Job(trained)
    assert before.items() <= content(trained).items()


def test_a_job_that_was_killed_before_it_wrote_the_index(
    trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Index, "write", lambda *_: 1 / 0)
        job = CheckpointFolder(trained)
        with pytest.raises(ZeroDivisionError):
            job.open(EPOCHS)
    kept = (trained / "checkpoints.json").read_bytes()
    Job(trained).save(5)
    (trained / "checkpoints.json").write_bytes(kept)
    with pytest.warns(UserWarning, match=r"is older than epoch-00005\.h5"):
        assert Job(trained).epoch == 5


def test_a_folder_of_the_version_before(trained: Path) -> None:
    """Its index had no checksum, and its files named no training."""
    expected = Index.read(trained).checkpoints
    shutil.rmtree(trained)
    trained.mkdir()
    for name, progress in expected.items():
        write_checkpoint(trained / name, {}, {}, asdict(progress))
    old = {"checkpoints": {k: asdict(v) for k, v in expected.items()}, "last_state": None}
    text = {"format": "tfdist_ext checkpoints 1", **old, "epochs_when_done": None}
    (trained / "checkpoints.json").write_text(json.dumps(text))
    assert Index.read(trained).checkpoints == expected
    Job(trained).train(until=5)
    assert epochs_in(trained) == [3, 4, 5]
    (trained / "checkpoints.json").unlink()
    with pytest.warns(UserWarning, match="is missing"):
        assert Job(trained).epoch == 5


def test_the_last_state_alone_is_no_checkpoint_to_train_on_from(ended: Path) -> None:
    for name in ("checkpoints.json", *(f"epoch-0000{n}.h5" for n in (3, 4, 5))):
        (ended / name).unlink()
    with pytest.warns(UserWarning, match="rebuilt from last-00005"):
        assert Job(ended).folder.last_state(EPOCHS) == "last-00005.h5"
    (ended / "checkpoints.json").unlink()
    with (
        pytest.warns(UserWarning, match="rebuilt from last-00005"),
        pytest.raises(tfd.TrainingError, match=r"to train 8 epochs, got last-00005\.h5 alone"),
    ):
        CheckpointFolder(ended).open(8)
