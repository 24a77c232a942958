"""tfdist plan: the table, the files it writes, and what it says of mistakes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tfdist_ext import cli
from tfdist_ext.placement import PlacementPlan

pytestmark = pytest.mark.usefixtures("four_cpus")

BUILDER = """
import keras

def build():
    ids = keras.Input([1], dtype="int32")
    table = keras.layers.Embedding({rows}, 16, name="users")(ids)
    return keras.Model(ids, keras.layers.Dense(1, name="head")(table))

nothing = 3
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.delitem(sys.modules, "script_with_builder", raising=False)
    path = tmp_path / "script_with_builder.py"
    path.write_text(BUILDER.format(rows=10_000_000))
    return path


def test_plan_shows_the_placement_of_a_script(
    script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture, json = tmp_path / "plan.svg", tmp_path / "plan.json"
    words = [f"{script}:build", "--ps", "4", "--optimizer", "adam", "--budget", "1GiB"]
    words += ["--rule", "head/.*=task 3", "--picture", str(picture), "--json", str(json)]
    assert cli.main(["plan", *words, "--compare"]) == 0
    printed = capsys.readouterr().out
    plan = PlacementPlan.from_json(json.read_text())
    assert plan.tasks_of("head/kernel") == (3,)
    assert len(plan.shards_of("users/embeddings")) >= 4
    assert plan.imbalance <= 1.01
    assert sum(plan.bytes_by_task) >= 3 * 10_000_000 * 16 * 4
    assert str(plan) in printed
    assert "users/embeddings" in picture.read_text()
    for strategy in ("mirrored", "central_storage", "placed", "parameter_server"):
        assert strategy in printed


def test_plan_of_workers_with_a_sharded_optimizer(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", f"{script}:build", "--workers", "4", "--optimizer", "adam"]) == 0
    printed = capsys.readouterr().out
    weights = 4 * 16 * 10_000_000  # and two slots, of which each worker has a quarter
    assert "on 4 workers" in printed
    assert printed.count(f"{weights * 1.5 / 2**20:.2f} MiB") == 4
    assert "on every worker, slots on worker 0, worker 1, worker 2, worker 3" in printed


def test_the_plan_of_more_workers_from_a_time_measured_elsewhere(
    script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "plan.svg"
    words = [f"{script}:build", "--workers", "4,1,2", "--network", "1Gbit", "--step", "0.35s"]
    assert cli.main(["plan", *words, "--batch-size", "64", "--picture", str(picture)]) == 0
    printed = capsys.readouterr().out
    assert "64 examples in 350 ms on one device" in printed
    assert "610.35 MiB of gradients" in printed  # without data, the whole table
    assert "On 1 Gbit/s, 2 workers would be slower than one" in printed
    assert "examples per second" in picture.read_text()


@pytest.mark.parametrize("name", ["script_with_builder.py", "time.py"])
def test_file_with_the_name_of_an_imported_module_is_refused(
    name: str, script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", f"{script}:build", "--ps", "2"]) == 0
    file = tmp_path / "other" / name
    file.parent.mkdir()
    file.write_text(script.read_text())
    assert cli.main(["plan", f"{file}:build", "--ps", "2"]) == 2
    module = name.removesuffix(".py")
    place = getattr(sys.modules[module], "__file__", "Python itself")
    assert capsys.readouterr().err.splitlines()[0] == (
        f"tfdist: error: the builder '{file}:build' cannot be imported: the name {module!r} is that"
        f" of a module from {place}. Rename {name}."
    )


NETWORK = ["{script}:build", "--workers", "1,2", "--network", "10Gbit"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([*NETWORK[:-1], "10", "--step", "1s"], "--network must be a rate with a unit"),
        ([*NETWORK, "--step=-1s"], "--step must be a time"),
        (NETWORK, "needs data to time steps (data=, --data)"),
        ([*NETWORK, "--step", "1s", "--json", "p.json"], "cannot be combined with"),
        (["{script}:build", "--ps", "2", "--network", "10Gbit"], "--network needs --workers"),
        (["{script}:build", "--workers", "1,2"], "needs --network"),
        (["{script}:build", "--workers", "two"], "invalid numbers value: 'two'"),
        (
            ["{script}:build", "--workers", "2", "--step", "1s"],
            "--step needs --network. Add --network 10Gbit.",
        ),
        (["{script}:build", "--ps", "2", "--data", "{script}:build"], "--data needs --network."),
        (["{script}:build", "--ps", "2", "--devices", "8"], "--devices needs --compare."),
        (["{script}:build", "--workers", "2", "--rule", "users/.*=task 1"], "cannot be combined"),
        (["{script}:build", "--workers", "2", "--compare"], "--compare needs --ps"),
        (["build", "--ps", "2"], "module:function"),
        (["nowhere.py:build", "--ps", "2"], "cannot be imported: No module named 'nowhere'"),
        (["{script}:biuld", "--ps", "2"], "has no attribute 'biuld'"),
        (["{script}:build", "--ps", "2", "--rule", "users"], "PATTERN=PLACEMENT"),
        (
            ["{script}:build", "--ps", "2", "--picture", "plan.gif"],
            "a picture must be a .svg or a .png file",
        ),
        (["{script}:build"], "--ps"),
    ],
)
def test_invalid_arguments_are_refused(
    words: list[str], said: str, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", *(word.format(script=script) for word in words)]) == 2
    assert said in capsys.readouterr().err
