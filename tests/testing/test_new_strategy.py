"""scripts/new_strategy: what it writes passes in an empty folder, and nothing is overwritten."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import tfdist_ext as tfd
from tfdist_ext.testing.new_strategy import write_strategy

ROOT = Path(__file__).parents[2]
# The template passes all checks in tests/testing/test_conformance.py.
FEW = "test_scope or test_all_reduce or test_update or test_keras_metrics"


@pytest.mark.long("everything")
@pytest.mark.parametrize(
    "checks",
    [
        pytest.param(["-k", FEW], id="few checks"),
        pytest.param([], id="everything"),
    ],
)
def test_it_passes_as_written(checks: list[str], tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "new_strategy"), "my_strategy.py"]
    made = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert made.stdout == (
        "wrote my_strategy.py and test_my_strategy.py\nnow: python -m pytest test_my_strategy.py\n"
    )
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "my_strategy.py",
        "test_my_strategy.py",
    ]
    again = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert again.returncode == 1
    assert again.stderr == (
        "scripts/new_strategy: my_strategy.py exists, and is not overwritten: take another name.\n"
    )
    test = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error", *checks]
    run = subprocess.run(test, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stdout[-5000:]
    assert " passed" in run.stdout


def test_without_the_repository(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tfdist_ext.testing.new_strategy"]
    for argument, code in (("my_strategy.py", 0), ("keras.py", 1)):
        made = subprocess.run(
            [*command, argument], cwd=tmp_path, capture_output=True, text=True, timeout=60
        )
        assert made.returncode == code, made.stderr
    assert made.stderr.startswith(
        "python -m tfdist_ext.testing.new_strategy: the file of a strategy must not"
    )
    assert sorted(file.name for file in tmp_path.glob("*.py")) == [
        "my_strategy.py",
        "test_my_strategy.py",
    ]


def test_the_names_follow_the_file(tmp_path: Path) -> None:
    strategy, test = write_strategy(tmp_path / "two_towers.py")
    assert "class TwoTowers(tfd.strategies.StrategyTemplate):" in strategy.read_text()
    assert "from two_towers import TwoTowers\n" in test.read_text()
    assert "class TestTwoTowers(StrategyConformance):" in test.read_text()
    strategy, test = write_strategy(tmp_path / "TwoGPUTowers.py")
    assert "class TwoGPUTowers(tfd.strategies.StrategyTemplate):" in strategy.read_text()
    assert "from TwoGPUTowers import TwoGPUTowers\n" in test.read_text()
    assert test.name == "test_TwoGPUTowers.py"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my-strategy.py", "must be a Python module such as my_strategy.py, got 'my-str"),
        ("my_strategy", "got 'my_strategy'"),
        ("class.py", r"got 'class\.py'"),
        ("__.py", r"got '__\.py'"),
        ("keras.py", "got 'keras.py': `import keras` would find the other one"),
        ("pytest.py", "`import pytest` would find the"),
        ("types.py", "`import types` would find the"),
        ("conftest.py", "`import conftest` would find the"),
        ("__init__.py", "`import __init__` would find the"),
        ("nowhere/mine.py", "there is no folder .*nowhere: make it first"),
    ],
)
def test_names_that_cannot_be(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(tfd.StrategyError, match=message):
        write_strategy(tmp_path / name)


def test_the_test_file_is_not_overwritten_either(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text("mine")
    with pytest.raises(tfd.StrategyError, match=r"test_mine\.py exists, and is not overwritten"):
        write_strategy(tmp_path / "mine.py")
    assert not (tmp_path / "mine.py").exists()
