"""There is no TPU here: every way to ask for one ends in a sentence, and soon."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
import tensorflow as tf

import tfdist_ext as tfd
from tfdist_ext.strategies import several_machines


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(several_machines, "REACH_SECONDS", 0.3)
    # A metadata server that refuses, whatever network this machine has.
    monkeypatch.setenv("GCE_METADATA_IP", "127.0.0.1:1")


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a server that accepts connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def test_a_silent_server_is_no_tpu(silent: str) -> None:
    with pytest.raises(tfd.StrategyError, match=f"no TPU server answers at {silent}"):
        tfd.create_strategy("tpu", tpu=f"grpc://{silent}")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, ["no TPU found: neither TPU_NAME nor tpu=", "Devices seen are CPU:0, CPU:1"]),
        ({"tpu": "grpc://127.0.0.1:1"}, ["no TPU server answers at 127.0.0.1:1"]),
        ({"tpu": "127.0.0.1:8470"}, ["no TPU found at '127.0.0.1:8470'", "as 'grpc://host:port'"]),
        ({"tpu": "my-tpu"}, ["no TPU found at 'my-tpu'", "refused", "zone="]),
        ({"tpu": "my-tpu", "zone": "z", "project": "p"}, ["no TPU found at 'my-tpu'", "client"]),
        ({"devices": 8}, ["has no option devices=8", "cluster, tpu, zone, project"]),
    ],
)
def test_a_missing_tpu_is_an_error_soon(options: dict[str, Any], words: list[str]) -> None:
    started = time.monotonic()
    with pytest.raises(tfd.StrategyError) as error:
        tfd.create_strategy("tpu", **options)
    assert time.monotonic() - started < 3
    for word in words:
        assert word in str(error.value)


def test_a_metadata_server_that_is_silent_does_not_hang_us(
    silent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GCE_METADATA_IP", silent)
    monkeypatch.setattr(several_machines, "TPU_LOOKUP_SECONDS", 0.3)
    with pytest.raises(tfd.StrategyError, match=r"no answer within 0\.3 s"):
        tfd.create_strategy("tpu", tpu="my-tpu")


def test_tpu_name_of_the_environment_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPU_NAME", "grpc://127.0.0.1:1")
    for name in ("auto", "tpu"):
        with pytest.raises(tfd.StrategyError, match="no TPU found at 'grpc://127"):
            tfd.create_strategy(name)
    assert tfd.create_strategy(devices=2).num_replicas_in_sync == 2  # of this machine


def test_a_tpu_resolver_is_tried_alone() -> None:
    resolver = tf.distribute.cluster_resolver.TPUClusterResolver("grpc://127.0.0.1:1")
    with pytest.raises(tfd.StrategyError, match="no TPU found at the TPUClusterResolver"):
        tfd.create_strategy(cluster=resolver)
    with pytest.raises(tfd.StrategyError, match=r"takes either a TPUClusterResolver .* and 'x'"):
        tfd.create_strategy("tpu", cluster=resolver, tpu="x")


def test_the_cluster_of_the_environment_is_not_the_tpus(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = tfd.ClusterConfig(jobs={"worker": ("a:1",)}, task=tfd.Task("worker", 0))
    with pytest.raises(tfd.StrategyError, match="takes either a TPUClusterResolver"):
        tfd.create_strategy("tpu", cluster=cluster)
    monkeypatch.setenv("TF_CONFIG", cluster.to_tf_config())
    with pytest.raises(tfd.StrategyError, match="no TPU found at 'local'"):
        tfd.create_strategy("tpu", tpu="local")
