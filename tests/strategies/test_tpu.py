"""There is no TPU here: every way to ask for one ends in a sentence, and soon."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import tensorflow as tf

import tfdist_ext as tfd
from tfdist_ext.strategies import tpu


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tpu, "REACH_SECONDS", 0.3)
    # A metadata server that refuses, whatever network this machine has.
    monkeypatch.setenv("GCE_METADATA_IP", "127.0.0.1:1")


def _server(answer: bytes | None) -> Iterator[str]:
    """Accepts one connection; says `answer` and closes, or None: keeps it open in silence."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(5)
        kept = []

        def serve() -> None:
            connection, _ = server.accept()
            connection.recv(100)
            if answer is None:
                kept.append(connection)
            else:
                connection.sendall(answer)
                connection.close()

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        thread.join()
        for connection in kept:
            connection.close()


@pytest.mark.parametrize(
    "answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"", None], ids=["http", "closes", "silent"]
)
def test_another_program_is_no_tpu(answer: bytes | None) -> None:
    server = _server(answer)
    address = next(server)
    with pytest.raises(tfd.StrategyError, match=f"no TPU server answers at {address}"):
        tfd.create_strategy("tpu", tpu=f"grpc://{address}")
    next(server, None)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, ["TPU_NAME is not set and tpu= was not given", "Devices seen are CPU:0, CPU:1"]),
        ({"tpu": "local"}, ["no TPU found at 'local'", "TPUs not found", "Devices seen are CPU:0"]),
        ({"tpu": "grpc://127.0.0.1:1"}, ["no TPU server answers at 127.0.0.1:1"]),
        ({"tpu": "grpc://nonsense"}, ["no TPU server answers at nonsense"]),
        ({"tpu": "127.0.0.1:8470"}, ["write it as 'grpc://127.0.0.1:8470'"]),
        ({"tpu": "my-tpu"}, ["no TPU found under the name 'my-tpu'", "refused", "zone="]),
        ({"tpu": "my-tpu", "zone": "z", "project": "p"}, ["no TPU found at 'my-tpu'", "client"]),
        ({"tpu": 3}, ["tpu must be a text, got 3"]),
        ({"tpu": ""}, ["tpu must be a text, got ''"]),
        ({"tpu": "t", "zone": 1}, ["zone must be a text, got 1"]),
        ({"devices": 8}, ["must be cluster, tpu, zone, project", "got devices=8"]),
    ],
)
def test_it_says_why_and_soon(options: dict[str, Any], words: list[str]) -> None:
    started = time.monotonic()
    with pytest.raises(tfd.StrategyError) as error:
        tfd.create_strategy("tpu", **options)
    assert time.monotonic() - started < 3
    for word in words:
        assert word in str(error.value)


def test_a_metadata_server_that_is_silent_does_not_hang_us(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = _server(None)
    monkeypatch.setenv("GCE_METADATA_IP", next(server))
    monkeypatch.setattr(tpu, "LOOKUP_SECONDS", 0.3)
    with pytest.raises(tfd.StrategyError, match=r"no answer within 0\.3 s"):
        tfd.create_strategy("tpu", tpu="my-tpu")
    next(server, None)


def test_tpu_name_of_the_environment_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPU_NAME", "grpc://127.0.0.1:1")
    for name in ("auto", "tpu"):
        with pytest.raises(tfd.StrategyError, match="no TPU found at 'grpc://127"):
            tfd.create_strategy(name)
    assert tfd.create_strategy(devices=2).num_replicas_in_sync == 2  # of this machine


@pytest.mark.parametrize("name", ["auto", "tpu"])
def test_a_resolver_of_a_tpu(name: str) -> None:
    resolver = tf.distribute.cluster_resolver.TPUClusterResolver("grpc://127.0.0.1:1")
    with pytest.raises(tfd.StrategyError, match="no TPU found at the TPUClusterResolver"):
        tfd.create_strategy(name, cluster=resolver)
    with pytest.raises(tfd.StrategyError, match="got both"):
        tfd.create_strategy("tpu", cluster=resolver, tpu="x")


def test_another_cluster_is_not_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = tfd.ClusterConfig(jobs={"worker": ("a:1",)}, task=tfd.Task("worker", 0))
    with pytest.raises(tfd.StrategyError, match="must be a TPUClusterResolver"):
        tfd.create_strategy("tpu", cluster=cluster, tpu="local")
    # One of the environment is none of its business.
    monkeypatch.setenv("TF_CONFIG", cluster.to_tf_config())
    with pytest.raises(tfd.StrategyError, match="no TPU found at 'local'"):
        tfd.create_strategy("tpu", tpu="local")
