"""A private name that is gone breaks what needs it, with a sentence, and nothing else."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from task_programs import LEFT_OUT

import tfdist_ext as tfd
from tfdist_ext import private_names
from tfdist_ext.private_names import PrivateNames

ROOT = Path(__file__).parents[1]
QUARANTINE = sorted((ROOT / "tfdist_ext").rglob("_*_private.py"))


@pytest.mark.usefixtures("four_cpus")
@pytest.mark.parametrize("path", QUARANTINE, ids=lambda path: f"{path.parent.name}{path.stem}")
def test_every_private_name_is_there(path: Path) -> None:
    """The name that a release of TensorFlow or Keras has moved is in the error."""
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    names = importlib.import_module(module).NAMES
    assert names.uses
    for name in names.uses:
        assert names(name) is not None


@pytest.mark.parametrize("path", ["distribute.values.Gone", "distribute.gone.Mirrored"])
def test_missing_private_name_raises_with_its_feature(path: str) -> None:
    names = PrivateNames("tensorflow.python", tfd.StrategyError, {path: "values per replica"})
    said = f"does not have the private name tensorflow.python.{path}, which is needed for values"
    with pytest.raises(tfd.StrategyError, match=said) as caught:
        names(path)
    _, oldest, newest = private_names.TESTED["tensorflow"]
    assert f"Install a release from {oldest} to {newest}" in str(caught.value)


def test_mirrored_training_needs_few_private_names() -> None:
    """In a process of its own, where every look-up of ours fails from the start."""
    code = """
from tfdist_ext import private_names

def missing(self, path):
    raise self._gone(path, self.uses[path])

private_names.PrivateNames.__call__ = missing
import tensorflow as tf
import tfdist_ext as tfd

for name in ("mirrored", "one_device", "central_storage", "default"):
    options = {"logical_cpus": 2} if name == "mirrored" else {}
    strategy = tfd.create_strategy(name, **options)
    with strategy.scope():
        variable = tf.Variable(1.0)
    print(name, strategy.run(lambda: 1) is not None, variable.numpy(), end="; ")
print([*tfd.data.from_arrays(tf.range(4).numpy(), global_batch_size=4).dataset()][0].numpy())
try:
    tfd.strategies.StrategyTemplate(2).run(lambda: 1)
except tfd.StrategyError as error:
    print(error)
"""
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": LEFT_OUT},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    first, second = run.stdout.strip().splitlines()
    of_each = "; ".join(
        f"{name} True 1.0" for name in ("mirrored", "one_device", "central_storage", "default")
    )
    assert first == f"{of_each}; [0 1 2 3]"
    assert " does not have the private name " in second


def test_the_package_requires_the_releases_that_are_tested() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for package, (_, oldest, newest) in private_names.TESTED.items():
        major, minor = newest.split(".")
        assert f'"{package}>={oldest},<{major}.{int(minor) + 1}"' in project
