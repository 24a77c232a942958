"""The pytest plugin in sessions that do not use it, or use it wrongly: imports and messages."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

# What the plugin may import, in a process that has imported pytest.
LOADED = {
    "tfdist_ext",
    "tfdist_ext.testing",
    "tfdist_ext.testing.plugin",
}

CONFTEST = """
import json
import sys

def pytest_sessionfinish():
    with open("loaded.json", "w") as file:
        json.dump(sorted(sys.modules), file)
"""
HEAVY = ("asyncio", "hypothesis", "keras", "multiprocessing", "numpy", "tensorflow")


def run_pytest(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run pytest with this plugin and no other: others import what they like."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options]
    env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command += ["-p", "tfdist_ext.testing.plugin"]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=60)


def test_plain_session_loads_no_heavy_module(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("def test_it():\n    pass\n")
    (tmp_path / "conftest.py").write_text(CONFTEST)
    run = run_pytest(tmp_path, "--strict-markers", "-W", "error")
    assert run.returncode == 0, run.stdout + run.stderr
    loaded = set(json.loads((tmp_path / "loaded.json").read_text()))
    assert {name for name in loaded if name.partition(".")[0] == "tfdist_ext"} == LOADED
    assert not loaded & set(HEAVY)


WRONG_MARKS = {
    "tfdist_cluster(2)": "tfdist_cluster takes numbers of tasks by name, not (2,). Write"
    " @pytest.mark.tfdist_cluster(worker=2, ps=1).",
    "tfdist_logical_cpus(4, cores=2)": "tfdist_logical_cpus takes one integer from 1, not (4,"
    " cores=2). Write @pytest.mark.tfdist_logical_cpus(4).",
}


def test_invalid_mark_is_an_error_of_the_test(tmp_path: Path) -> None:
    test = "import pytest\n@pytest.mark.{}\ndef test_{}():\n    pass\n"
    for number, mark in enumerate(WRONG_MARKS):
        (tmp_path / f"test_{number}.py").write_text(test.format(mark, number))
    run = run_pytest(tmp_path)
    assert run.returncode == pytest.ExitCode.TESTS_FAILED
    assert f"{len(WRONG_MARKS)} errors in" in run.stdout
    assert "Traceback" not in run.stdout + run.stderr
    assert "/testing/" not in run.stdout
    for number, message in enumerate(WRONG_MARKS.values()):
        text = run.stdout[run.stdout.index(f"ERROR at setup of test_{number}") :]
        assert re.match(rf".*\n{re.escape(message)}", text)


def test_invalid_option_is_a_usage_error(tmp_path: Path) -> None:
    run = run_pytest(tmp_path, "--tfdist-strategies=mirrored_2,mirored_2")
    assert run.returncode == pytest.ExitCode.USAGE_ERROR
    assert run.stderr.strip() == (
        "ERROR: --tfdist-strategies: a strategy for tests must be one of one_device, mirrored_2,"
        " central_storage_2, template_2, placed_2, multi_worker_2 (with any number of replicas),"
        " got 'mirored_2'."
    )
