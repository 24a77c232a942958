"""A private name that is gone breaks what needs it, with a sentence, and nothing else."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

import tfdist_ext as tfd
from tfdist_ext import private_names
from tfdist_ext.placement.live import _keras_private as kp
from tfdist_ext.placement.live import _tf_private as servers
from tfdist_ext.private_names import PrivateNames
from tfdist_ext.strategies import StrategyTemplate
from tfdist_ext.strategies import _tf_private as tp
from tfdist_ext.strategies.shared_step import SharedStep

ROOT = Path(__file__).parents[2]


class Shared(StrategyTemplate):
    """One copy of each variable, on the first device."""

    def create_variable(self, spec: Any, create: Callable[..., Any], beside: Any = None) -> Any:
        return create([self.devices[0]])


def use_template() -> None:
    """A strategy of one's own, with a variable that replicas share."""
    with Shared(2).scope():
        tf.Variable(1.0)


def use_shards() -> None:
    """The gradient of a variable in shards."""
    whole = servers.partitioned([tf.Variable([1.0]), tf.Variable([2.0, 3.0])], "whole")
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.convert_to_tensor(whole))
    assert tf.convert_to_tensor(tape.gradient(loss, whole.handle)).shape == [3]


def use_counters() -> None:
    """The variable of a metric on a parameter server."""
    assert tp.counter_class()


def use_plan() -> None:
    """A plan of a model that is built without values."""

    def build() -> Any:
        import keras

        return keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])

    tfd.plan_placement(build, ps=2)


def use_shared_step() -> None:
    """A step that is traced once for two replicas, with packed handles."""
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        weight = tf.Variable(2.0)

    @tf.function(autograph=False)
    def run() -> list[tf.Tensor]:
        args = [[tf.constant(1.0)], [tf.constant(3.0)]]
        devices = strategy.extended.worker_devices
        step = SharedStep(strategy, devices, 0, lambda x: x * weight, args, list)
        return step(args)

    with tp.lightly_optimized():
        assert [float(result) for result in run()] == [2.0, 6.0]


# One name of each table, and of each feature of the first; tests of each table show that all are
# there.
USES: list[tuple[PrivateNames, str, Callable[[], None]]] = [
    (tp.NAMES, "distribute.mirrored_strategy.MirroredExtended", use_template),
    (tp.NAMES, "distribute.ps_values.AggregatingVariable", use_template),
    (tp.NAMES, "framework.ops.pack_eager_tensors", use_shared_step),
    (tp.NAMES, "distribute.ps_values.CachingVariable", use_counters),
    *((servers.NAMES, name, use_shards) for name in servers.NAMES.uses),
    *((kp.NAMES, name, use_plan) for name in kp.NAMES.uses),
]


@pytest.fixture
def hide(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that makes our look-ups miss one name; TensorFlow itself keeps it."""
    classes = (
        tp.copied_variable_class,
        tp.counter_class,
        tp.mirrored_class,
        servers.server_variable_class,
        servers.partitioned_variable_class,
    )

    def clear() -> None:
        for made in classes:
            made.cache_clear()

    def hide(names: PrivateNames, path: str) -> None:
        found = PrivateNames._module
        place, _, name = path.rpartition(".")

        class Without:
            def __init__(self, module: Any):
                self._module = module

            def __getattr__(self, asked: str) -> Any:
                if asked == name:
                    raise AttributeError(asked)
                return getattr(self._module, asked)

        def module(self: PrivateNames, where: str) -> Any:
            hidden = self is names and where == place
            return Without(found(self, where)) if hidden else found(self, where)

        monkeypatch.setattr(PrivateNames, "_module", module)
        clear()

    yield hide
    clear()


@pytest.mark.parametrize(
    ("names", "name", "use"), USES, ids=[f"{n.package}.{name}" for n, name, _ in USES]
)
def test_a_missing_name_is_named(
    names: PrivateNames, name: str, use: Callable[[], None], hide: Any
) -> None:
    hide(names, name)
    with pytest.raises(names.error) as caught:
        use()
    _, oldest, newest = private_names.TESTED[names.package.partition(".")[0]]
    message = str(caught.value)
    assert f"does not have the private name {names.package}.{name}, which is needed" in message
    assert f"Install a release from {oldest} to {newest}" in message


def test_mirrored_needs_none() -> None:
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
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr[-3000:]
    first, second = run.stdout.strip().splitlines()
    of_each = "; ".join(
        f"{name} True 1.0" for name in ("mirrored", "one_device", "central_storage", "default")
    )
    assert first == f"{of_each}; [0 1 2 3]"
    assert " does not have the private name " in second


def test_setup_allows_the_releases_that_are_tested() -> None:
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    for package, (_, oldest, newest) in private_names.TESTED.items():
        major, minor = newest.split(".")
        assert f'"{package}>={oldest},<{major}.{int(minor) + 1}"' in setup


@pytest.mark.parametrize("module", [tp, servers, kp])
def test_no_name_is_imported(module: Any) -> None:
    text = Path(module.__file__).read_text(encoding="utf-8")
    assert not re.search(r"^\s*(from|import) (tensorflow\.python|keras\.src)", text, re.M)
