"""Workflows run what .ci/run runs, with pinned actions; the version stands in one place."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import yaml
from pages import ROOT, commands_of

import tfdist_ext as tfd

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
SCRIPT = re.compile(r"(?:scripts/|\.ci/)\w+")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def jobs_of(workflow: Path) -> dict[str, dict[str, Any]]:
    return yaml.safe_load(workflow.read_text(encoding="utf-8"))["jobs"]


def runs_of(workflow: Path) -> list[str]:
    """The commands of all jobs, without the prefix that makes one run as root."""
    steps = [step for job in jobs_of(workflow).values() for step in job["steps"]]
    return [step["run"].removeprefix('sudo env "PATH=$PATH" ') for step in steps if "run" in step]


def commands_of_ci_run() -> list[str]:
    lines = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line.startswith("scripts/")]


def test_contributing_lists_all_that_ci_runs() -> None:
    """scripts/test runs scripts/check."""
    listed = {command for command, _ in commands_of("CONTRIBUTING.md") if SCRIPT.match(command)}
    assert listed == {*commands_of_ci_run(), "scripts/check", "scripts/coverage", ".ci/run"}


def test_readme_shows_commands_as_ci_runs_them() -> None:
    in_checkout = [c for c, _ in commands_of("README.md") if SCRIPT.match(c)]
    assert in_checkout == ["scripts/demo", "scripts/test"]
    assert set(in_checkout) <= set(commands_of_ci_run())


def test_jobs_of_ci_run_what_ci_run_runs() -> None:
    runs = runs_of(ROOT / ".github" / "workflows" / "ci.yml")
    assert sorted(runs) == sorted([*commands_of_ci_run(), "scripts/check", "scripts/coverage"])


def test_ci_tests_each_python_that_the_package_names() -> None:
    prefix = "Programming Language :: Python :: 3."
    pythons = [c.rpartition(" ")[2] for c in PROJECT["classifiers"] if c.startswith(prefix)]
    jobs = jobs_of(ROOT / ".github" / "workflows" / "ci.yml")
    assert jobs["test"]["strategy"]["matrix"]["python-version"] == pythons
    assert PROJECT["requires-python"] == f">={pythons[0]}"


def test_actions_are_pinned_by_one_hash_with_its_tag() -> None:
    pins: dict[str, set[str]] = {}
    for workflow in WORKFLOWS:
        for line in re.findall(r"uses: (.*)", workflow.read_text(encoding="utf-8")):
            pin = re.fullmatch(r"([\w./-]+)@([0-9a-f]{40}  # v\d+\.\d+\.\d+)", line)
            assert pin, f"{workflow.name} does not pin {line}"
            pins.setdefault(pin[1], set()).add(pin[2])
    assert {action: len(found) for action, found in pins.items()} == dict.fromkeys(pins, 1)


def test_only_jobs_without_code_of_the_repository_may_publish() -> None:
    for workflow in WORKFLOWS:
        text = yaml.safe_load(workflow.read_text(encoding="utf-8"))
        assert text["permissions"] == {"contents": "read"}, workflow.name
        for name, job in text["jobs"].items():
            may_write = "write" in job.get("permissions", {}).values()
            checks_out = any("checkout" in step.get("uses", "") for step in job["steps"])
            assert may_write != checks_out, f"{workflow.name}: {name}"
            assert job["timeout-minutes"] <= 90, f"{workflow.name}: {name}"


def test_the_version_stands_in_one_place() -> None:
    """And as the title of the changelog's newest part."""
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    titles = re.findall(r"^## (\S+)", changelog, re.M)
    assert titles[0] == tfd.__version__
    number = re.compile(rf"(?<![\w.]){re.escape(tfd.__version__)}(?![\w.])")
    for path in [*ROOT.glob("*.*"), *(ROOT / "docs").glob("*.md")]:
        if path.is_file() and path.name != "CHANGELOG.md":
            assert not number.search(path.read_text(encoding="utf-8")), path.name
