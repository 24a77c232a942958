"""A project outside of this one, with the plugin of the installed wheel."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from task_programs import LEFT_OUT

ROOT = Path(__file__).parents[2]


def run_it(project: Path, python_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": f"{python_path}:{LEFT_OUT}", "TF_CPP_MIN_LOG_LEVEL": "2"}
    where = "import tfdist_ext; print(tfdist_ext.__file__)"
    python = [sys.executable, "-c", where]
    used = subprocess.check_output(python, cwd=project, env=env, text=True, timeout=60)
    assert Path(used.strip()).is_relative_to(python_path)

    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error"]
    command.append("--tfdist-strategies=multi_worker_2")
    run = subprocess.run(command, cwd=project, env=env, capture_output=True, text=True, timeout=250)
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-2000:]
    assert re.search(r"^3 passed in", run.stdout, re.M)


def test_the_sample_project_passes_on_the_checkout(tmp_path: Path) -> None:
    project = shutil.copytree(ROOT / "tests" / "sample_project", tmp_path / "project")
    run_it(project, ROOT)


@pytest.mark.long
def test_the_sample_project_passes_on_the_installed_wheel(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    source = tmp_path / "source"  # what a build writes beside its sources stays away from them
    for name in ("tfdist_ext", "docs"):
        shutil.copytree(ROOT / name, source / name)
    for name in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)
    wheels, installed = tmp_path / "wheels", tmp_path / "installed"
    build = [*pip, "wheel", "--no-deps", "--wheel-dir", str(wheels), str(source)]
    subprocess.run(build, check=True, timeout=120)
    (wheel,) = wheels.glob("*.whl")
    # Without what it needs, which is here; the extras are those of README.md.
    extras = f"{wheel}[tensorboard,records]"
    install = [*pip, "install", "--no-deps", "--target", str(installed), extras]
    subprocess.run(install, check=True, timeout=60)

    (metadata,) = installed.glob("tfdist_ext-*.dist-info/METADATA")
    provided = re.findall(r"^Provides-Extra: (.*)$", metadata.read_text(encoding="utf-8"), re.M)
    assert {"tensorboard", "records", "launch", "ray", "plot", "pytest"} <= set(provided)

    # Errors name pages that are installed.
    code = "import tfdist_ext.errors as e; print(e.address_of(e.PeerError.help_page))"
    env = {**os.environ, "PYTHONPATH": str(installed)}
    shown = subprocess.check_output([sys.executable, "-c", code], env=env, cwd=tmp_path, text=True)
    page, _, section = shown.strip().partition(", section ")
    assert Path(page) == installed / "tfdist_ext" / "docs" / "error_messages.md"
    assert section.strip('"') in Path(page).read_text(encoding="utf-8").lower()

    project = shutil.copytree(ROOT / "tests" / "sample_project", tmp_path / "project")
    run_it(project, installed)


def test_sample_tests_are_those_of_the_page() -> None:
    page = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    assert block == (ROOT / "tests" / "sample_project" / "test_ratings.py").read_text("utf-8")
