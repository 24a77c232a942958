"""tfdist plan: the table, the files it writes, and what it says of mistakes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tfdist_ext import cli
from tfdist_ext.placement import PlacementPlan

BUILDER = """
import keras

def build():
    ids = keras.Input([1], dtype="int32")
    table = keras.layers.Embedding({rows}, 16, name="users")(ids)
    return keras.Model(ids, keras.layers.Dense(1, name="head")(table))

nothing = 3
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script_with_builder.py"
    path.write_text(BUILDER.format(rows=10_000_000))
    return path


def test_the_plan_of_a_script(script: Path, tmp_path: Path) -> None:
    """As a user calls it: in a process of its own, from another folder."""
    picture, json = tmp_path / "plan.svg", tmp_path / "plan.json"
    words = [f"{script}:build", "--ps", "4", "--optimizer", "adam", "--budget", "1GiB"]
    words += ["--rule", "head/.*=task 3", "--picture", str(picture), "--json", str(json)]
    run = subprocess.run(
        [sys.executable, "-m", "tfdist_ext.cli", "plan", *words, "--compare"],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    plan = PlacementPlan.from_json(json.read_text())
    assert plan.tasks_of("head/kernel") == (3,)
    assert len(plan.shards_of("users/embeddings")) >= 4
    assert plan.imbalance <= 1.01
    assert sum(plan.bytes_by_task) >= 3 * 10_000_000 * 16 * 4
    assert str(plan) in run.stdout
    assert "users/embeddings" in picture.read_text()
    for strategy in ("mirrored", "central_storage", "placed", "parameter_server"):
        assert strategy in run.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["build", "--ps", "2"], "module:function"),
        (["nowhere.py:build", "--ps", "2"], "cannot be imported: No module named 'nowhere'"),
        (["{script}:biuld", "--ps", "2"], "has no attribute 'biuld'"),
        (["{script}:build", "--ps", "2", "--rule", "users"], "PATTERN=PLACEMENT"),
        (["{script}:build", "--ps", "2", "--rule", "users/.*=task"], "a placement must be written"),
        (
            ["{script}:build", "--ps", "2", "--picture", "plan.gif"],
            "a picture must be a .svg or a .png file",
        ),
        (["{script}:build"], "--ps"),
    ],
)
def test_mistakes_are_named(
    words: list[str], said: str, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", *(word.format(script=script) for word in words)]) == 2
    assert said in capsys.readouterr().err
