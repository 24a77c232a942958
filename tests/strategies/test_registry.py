"""The table of strategies, and registered strategies."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

import tfdist_ext as tfd
from tfdist_ext.strategies import registry

_ONE_WORKER = tf.distribute.cluster_resolver.SimpleClusterResolver(
    tf.train.ClusterSpec({"worker": ["a:1"]}), task_type="worker", task_id=0
)


class _OfResolver(tf.distribute.OneDeviceStrategy):
    def __init__(self, cluster_resolver: Any):
        super().__init__("CPU:0")
        self._resolver = cluster_resolver

    @property
    def cluster_resolver(self) -> Any:
        return self._resolver


@pytest.fixture(autouse=True)
def _table_of_one_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_TABLE", dict(registry._TABLE))


def test_a_registered_strategy_gets_its_options() -> None:
    made = []

    def mine(*, device: str = "CPU:0", twice: bool = False) -> tf.distribute.Strategy:
        made.append((device, twice))
        return tf.distribute.OneDeviceStrategy(device)

    tfd.register_strategy("mine", mine, "my own")
    strategy = tfd.create_strategy("mine", device="CPU:2")
    assert made == [("CPU:2", False)]
    assert type(strategy) is tf.distribute.OneDeviceStrategy
    assert strategy.extended.worker_devices[0].endswith("CPU:2")
    assert tfd.available_strategies()["mine"] == "my own"
    assert "mine (OneDeviceStrategy)" in str(tfd.explain(strategy))
    said = 'has no option twic=True. Did you mean "twice"'
    with pytest.raises(tfd.StrategyError, match=said):
        tfd.create_strategy("mine", twic=True)


def test_a_registered_strategy_gets_the_cluster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    got: list[Any] = []

    def mine(cluster: Any = None) -> tf.distribute.Strategy:
        got.append(cluster)
        return tf.distribute.OneDeviceStrategy("CPU:0")

    tfd.register_strategy("mine", mine, "my own")
    config = tfd.ClusterConfig(jobs={"worker": ("a:1", "b:1")}, task=tfd.Task("worker", 1))
    tfd.create_strategy("mine")
    tfd.create_strategy("mine", cluster=config)
    strategy = tfd.create_strategy("mine", cluster=_ONE_WORKER)
    assert got[0] is None
    assert got[1] is config
    assert got[2] is _ONE_WORKER
    assert "worker:0, the chief, in a cluster of 1 worker" in str(tfd.explain(strategy))
    monkeypatch.setenv("TF_CONFIG", config.to_tf_config())
    tfd.create_strategy("mine")
    assert got[3] == config


def test_a_class_is_a_factory_and_replaces_what_was_registered_before() -> None:
    tfd.register_strategy("mine", lambda: None, "of the cell of a notebook that has changed")
    tfd.register_strategy("mine", tf.distribute.OneDeviceStrategy, "my own")
    assert tfd.available_strategies()["mine"] == "my own"
    assert type(tfd.create_strategy("mine", device="CPU:1")) is tf.distribute.OneDeviceStrategy
    with pytest.raises(tfd.StrategyError, match=r"cannot be created: missing .* 'device'"):
        tfd.create_strategy("mine")


def test_a_class_of_tensorflow_gets_its_resolver() -> None:
    tfd.register_strategy("mine", _OfResolver, "my own")
    for name in ("cluster", "cluster_resolver"):
        strategy = tfd.create_strategy("mine", **{name: _ONE_WORKER})
        assert strategy.cluster_resolver is _ONE_WORKER


def test_a_factory_that_returns_no_strategy_is_refused() -> None:
    tfd.register_strategy("mine", lambda: tf.distribute.OneDeviceStrategy, "my own")
    with pytest.raises(tfd.StrategyError, match=r"which is not a tf\.distribute\.Strategy"):
        tfd.create_strategy("mine")


def test_wrong_registrations_are_refused() -> None:
    before = tfd.available_strategies()
    with pytest.raises(tfd.StrategyError, match="'mirrored' cannot be the name of a new strategy"):
        tfd.register_strategy("mirrored", lambda: None, "my own")
    with pytest.raises(tfd.StrategyError, match="is not a function: 'mirrored'"):
        tfd.register_strategy("mine", "mirrored", "my own")  # type: ignore[arg-type]
    assert tfd.available_strategies() == before
