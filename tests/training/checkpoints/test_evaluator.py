"""The evaluator's loop over checkpoints, on a training that these tests pretend."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_cases import dense

import tfdist_ext as tfd
from tfdist_ext.cluster.jobs import ClusterDescription
from tfdist_ext.cluster.liveness.watching import ALIVE
from tfdist_ext.launcher.exit_codes import RESTART
from tfdist_ext.strategies.cluster_tasks import RoleEnded
from tfdist_ext.training.checkpoints import evaluator
from tfdist_ext.training.checkpoints.evaluator import evaluate_checkpoints
from tfdist_ext.training.checkpoints.folder import name_of
from tfdist_ext.training.checkpoints.format import DamagedCheckpointError, Progress

ROWS = (np.zeros((4, 2)), np.zeros(4), np.ones(4))


class Model:
    """Restores files that hold a number, and evaluates to that number."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.built = True
        self.asked: list[dict[str, Any]] = []
        self.value = 0.0

    def restore_checkpoint(self, path: str) -> Progress:
        if not Path(path).exists():
            raise tfd.TrainingError(f"there is no checkpoint {path}")
        if not Path(path).read_text():
            raise DamagedCheckpointError(f"{path} is empty")
        held = json.loads(Path(path).read_text())
        self.value = held.pop("value")
        return Progress(**held)

    def evaluate(self, **arguments: Any) -> dict[str, float]:
        self.asked.append({**arguments, "of": self.value})
        return {"loss": self.value}


@pytest.fixture
def chief(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    monkeypatch.setattr(evaluator, "_LOOK_EVERY", 0.01)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener


def _follow(model: Model, chief: socket.socket, **options: Any) -> int:
    address = f"127.0.0.1:{chief.getsockname()[1]}"
    jobs = {"chief": (address,), "worker": ("w:1",), "ps": ("p:1",), "evaluator": ("e:1",)}
    arguments: dict[str, Any] = {
        "checkpoint_dir": model.folder, "epochs": 3, "validation_data": ROWS, "batch_size": 2,
        "steps": None, "callbacks": None, "verbose": 1, **options,
    }  # fmt: skip
    with pytest.raises(RoleEnded) as end:
        evaluate_checkpoints(
            model, ClusterDescription(jobs, tfd.Task("evaluator", 0), "TF_CONFIG"), **arguments
        )
    assert isinstance(end.value.code, int)
    return end.value.code


def _saved(folder: Path, *epochs: int, done: int | None = None) -> None:
    for epoch in epochs:
        _write(folder, Progress(epoch, 10 * epoch), epoch / 2)
    if done is not None:
        (folder / "owner.json").write_text(json.dumps({"job": "j", "epochs_when_done": done}))


def _write(folder: Path, progress: Progress, value: float) -> Path:
    path = folder / name_of(progress)
    path.write_text(json.dumps({**asdict(progress), "value": value}))
    return path


def test_each_checkpoint_is_evaluated_once_until_the_training_is_done(
    tmp_path: Path, chief: socket.socket, capsys: pytest.CaptureFixture[str]
) -> None:
    _saved(tmp_path, 1, 2, done=2)  # of a shorter training before
    _write(tmp_path, Progress(1, 14, batches=4), 0.75)
    model = Model(tmp_path)
    evaluate = model.evaluate

    def evaluate_while_training_goes_on(**arguments: Any) -> dict[str, float]:
        if model.value == 1.0:
            _saved(tmp_path, 3, done=3)
        return evaluate(**arguments)

    model.evaluate = evaluate_while_training_goes_on  # type: ignore[method-assign]
    assert _follow(model, chief) == 0
    assert [asked["of"] for asked in model.asked] == [0.5, 0.75, 1.0, 1.5]
    assert model.asked[0]["batch_size"] == 2
    assert model.asked[0]["sample_weight"] is ROWS[2]
    said = capsys.readouterr().err
    assert "evaluator:0: epoch 3 (step 30): loss: 1.5000\n" in said
    assert "evaluator:0: batch 4 of epoch 2 (step 14): loss: 0.7500\n" in said
    (file,) = (tmp_path / "evaluator").iterdir()
    assert file.read_bytes().count(b"evaluation_loss_vs_iterations") == 4
    assert file.read_bytes().count(b"epoch_loss") == 3  # not of the middle of an epoch


def test_checkpoints_that_are_damaged_or_gone_are_skipped(
    tmp_path: Path, chief: socket.socket, capsys: pytest.CaptureFixture[str]
) -> None:
    _saved(tmp_path, 1, 2, 3, done=3)
    (tmp_path / "epoch-00002.safetensors").write_bytes(b"")
    model = Model(tmp_path)
    restore = model.restore_checkpoint

    def restore_after_the_first_is_removed(path: str) -> Progress:
        (tmp_path / "epoch-00001.safetensors").unlink(missing_ok=True)
        return restore(path)

    model.restore_checkpoint = restore_after_the_first_is_removed  # type: ignore[method-assign]
    assert _follow(model, chief) == 0
    assert [asked["of"] for asked in model.asked] == [1.5]
    said = capsys.readouterr().err
    assert "epoch-00001.safetensors is not evaluated: there is no checkpoint" in said
    assert "epoch-00002.safetensors is not evaluated: " in said


def test_a_training_that_crashes_ends_it_with_138(
    tmp_path: Path, chief: socket.socket, capsys: pytest.CaptureFixture[str]
) -> None:
    _saved(tmp_path, 1)
    model = Model(tmp_path)
    evaluate = model.evaluate

    def evaluate_and_crash(**arguments: Any) -> dict[str, float]:
        chief.close()
        return evaluate(**arguments)

    model.evaluate = evaluate_and_crash  # type: ignore[method-assign]
    made = evaluator.TaskWatch.__init__

    def made_and_seen(self: Any, *args: Any) -> None:
        made(self, *args)
        self.state = ALIVE

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluator.TaskWatch, "__init__", made_and_seen)
        assert _follow(model, chief) == RESTART
    assert [asked["of"] for asked in model.asked] == [0.5]
    said = capsys.readouterr().err
    assert "is gone before the training in" in said
    assert "was complete" in said


def test_fit_in_an_evaluator_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = {"chief": ["c:1"], "worker": ["w:1"], "ps": ["p:1"], "evaluator": ["e:1"]}
    cluster = tfd.ClusterConfig(jobs, tfd.Task("evaluator", 0))
    monkeypatch.setenv("TF_CONFIG", cluster.to_tf_config())

    model = tfd.distribute(dense(1))
    x, y = np.zeros((4, 5)), np.zeros(4)
    for arguments in ({"validation_data": (x, y)}, {"checkpoint_dir": "somewhere"}):
        with pytest.raises(tfd.TrainingError, match=r"^evaluator:0 evaluates the .* Call fit\(val"):
            model.fit(x, y, **arguments)
