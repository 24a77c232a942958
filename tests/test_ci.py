"""CI runs what the pages tell people to run, in pinned actions."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import tfdist_ext as tfd

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
OF_CI = re.findall(r"^scripts/.*$", (ROOT / ".ci" / "run").read_text(encoding="utf-8"), re.M)


def commands_in(page: str) -> list[str]:
    """The commands of this repository in the console blocks of a page, without comments."""
    lines = re.findall(r"^\$ ((?:scripts|\.ci)/.*)$", (ROOT / page).read_text("utf-8"), re.M)
    return [line.partition("#")[0].strip() for line in lines]


def jobs_of(workflow: Path) -> dict[str, dict[str, Any]]:
    return yaml.safe_load(workflow.read_text(encoding="utf-8"))["jobs"]


def runs_of(job: dict[str, Any]) -> list[str]:
    """The commands of a job, once for each command of its matrix."""
    matrix = job.get("strategy", {}).get("matrix", {}).get("command", [""])
    runs = [step["run"] for step in job["steps"] if "run" in step]
    return [run.replace("${{ matrix.command }}", command) for run in runs for command in matrix]


def test_contributing_shows_all_commands_of_ci() -> None:
    # scripts/test runs scripts/check.
    assert set(commands_in("CONTRIBUTING.md")) == {*OF_CI, "scripts/check", ".ci/run"}


def test_the_jobs_of_ci_run_all_of_its_commands() -> None:
    jobs = jobs_of(ROOT / ".github" / "workflows" / "ci.yml")
    runs = [run for job in jobs.values() for run in runs_of(job)]
    for command in OF_CI:
        assert any(command in run for run in runs), command


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_pin_actions_and_run_scripts_that_exist(workflow: Path) -> None:
    for job in jobs_of(workflow).values():
        for step in job["steps"]:
            assert re.search(r"@[0-9a-f]{40}$", step.get("uses", "@" + "0" * 40)), step
        for run in runs_of(job):
            for script in re.findall(r"scripts/\w+", run):
                assert (ROOT / script).exists(), script


def test_the_version_is_in_one_place() -> None:
    for page in ("setup.py", "pyproject.toml", "README.md", "SECURITY.md"):
        assert tfd.__version__ not in (ROOT / page).read_text(encoding="utf-8"), page
    done = subprocess.run(
        [sys.executable, "setup.py", "--version"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.stdout.splitlines()[-1:] == [tfd.__version__], done.stderr[-2000:]
