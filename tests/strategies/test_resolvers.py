"""TensorFlow's own resolvers, as they are."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import tensorflow as tf

import tfdist_ext as tfd
from tfdist_ext.strategies import cluster_tasks
from tfdist_ext.strategies.cluster_tasks import describe, resolver_of

resolvers = tf.distribute.cluster_resolver
TWO = {"worker": ["h:1", "h:2"]}


def _simple(jobs: dict[str, Any], **task: Any) -> Any:
    return resolvers.SimpleClusterResolver(tf.train.ClusterSpec(jobs), **task)


def test_a_resolver_is_accepted_as_it_is() -> None:
    resolver = _simple(TWO, task_type="worker", task_id=1)
    assert resolver_of(resolver) is resolver
    described = describe(resolver)
    assert len(described.jobs["worker"]) == 2
    assert described.task == tfd.Task("worker", 1)
    assert described.source == type(resolver).__name__
    # The factory comes as far as TensorFlow, which has started in this process.
    with pytest.raises(tfd.StrategyError, match="must be created before TensorFlow starts"):
        tfd.create_strategy(cluster=resolver)


def test_a_resolver_without_a_cluster_is_one_machine() -> None:
    for empty in (resolvers.TFConfigClusterResolver(), _simple({})):
        strategy = tfd.create_strategy(cluster=empty)
        assert strategy.num_replicas_in_sync == 4  # this machine's devices
        line = f"{type(empty).__name__} was given, but describes no cluster"
        assert line in str(tfd.explain(strategy))
        for name in ("multi_worker_mirrored", "parameter_server"):
            with pytest.raises(
                tfd.StrategyError, match=f"{name} needs a cluster, but .* describes none"
            ):
                tfd.create_strategy(name, cluster=empty)


@pytest.mark.parametrize(
    ("resolver", "message"),
    [
        (_simple(TWO), "does not say which task this process is"),
        (_simple({"worker": ["h:1", "h:1"]}, task_type="worker", task_id=0), "the same address"),
        (_simple({"worker": {0: "h:1", 2: "h:3"}}), "cluster.worker[1] is blank"),
    ],
)
def test_a_resolver_that_would_hang_is_refused(resolver: Any, message: str) -> None:
    with pytest.raises(tfd.TfDistError) as error:
        tfd.create_strategy("multi_worker_mirrored", cluster=resolver)
    assert message in str(error.value)
    assert "SimpleClusterResolver" in str(error.value)


class _Own(resolvers.ClusterResolver):  # type: ignore[misc]
    """A resolver somebody wrote."""

    task_type, task_id = "worker", 0

    def __init__(self, ask: Any) -> None:
        self._ask = ask

    def cluster_spec(self) -> Any:
        return self._ask()

    def master(self, *_: Any, **__: Any) -> str:
        return ""


def test_a_resolver_that_fails_or_hangs_is_an_error_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError("no route to host")

    with pytest.raises(
        tfd.StrategyError, match="_Own cannot describe the cluster: OSError: no route to host"
    ):
        tfd.create_strategy(cluster=_Own(fail))
    release = threading.Event()
    monkeypatch.setattr(cluster_tasks, "LOOKUP_SECONDS", 0.1)
    with pytest.raises(tfd.StrategyError, match=r"TimeoutError: no answer within 0\.1 s"):
        tfd.create_strategy(cluster=_Own(release.wait))
    release.set()
