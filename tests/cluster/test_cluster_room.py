"""The rules of this room: no TensorFlow, nothing from upstairs, one story a module."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import tfdist_ext.cluster

ROOM = Path(tfdist_ext.cluster.__file__).parent
MODULES = sorted(ROOM.rglob("*.py"))


def test_the_public_names() -> None:
    assert tfdist_ext.cluster.__all__ == [
        "ClusterConfig",
        "Task",
        "describe_environments",
    ]
    assert all(hasattr(tfdist_ext.cluster, name) for name in tfdist_ext.cluster.__all__)


@pytest.mark.parametrize("module", MODULES, ids=lambda module: str(module.relative_to(ROOM)))
def test_imports_and_size(module: Path) -> None:
    text = module.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 500
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            names = [str(node.module)]
        else:
            continue
        for name in names:
            allowed = (
                name.split(".")[0] in sys.stdlib_module_names
                or name.startswith(("tfdist_ext.errors", "tfdist_ext.cluster"))
                or name in ("tfdist_ext.messages", "tfdist_ext.user_frames")
                or (name == "grpc" and node not in tree.body)
            )
            assert allowed, f"{module.name} imports {name}"


def test_the_environment_is_read_in_one_place() -> None:
    assert len(MODULES) > 10
    readers = [m.name for m in MODULES if "environ" in _names(m) or "getenv" in _names(m)]
    assert readers == ["config.py"]  # the default of from_env


def _names(module: Path) -> set[str]:
    tree = ast.parse(module.read_text(encoding="utf-8"))
    return {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)} | {
        node.id for node in ast.walk(tree) if isinstance(node, ast.Name)
    }


def test_tensorflow_is_not_loaded() -> None:
    code = (
        "import sys; from tfdist_ext.cluster import ClusterConfig, describe_environments as found;"
        "ClusterConfig.from_env({}); found({});"
        "heavy = {'tensorflow', 'keras', 'numpy', 'grpc'};"
        "print(sorted(heavy & {m.split('.')[0] for m in sys.modules}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOM.parents[1],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.strip() == "[]"
