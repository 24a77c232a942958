"""through_service with real servers in this process: who gets what, and what is refused."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from tfdist_ext.data.service_address import dispatcher_address, wait_for_dispatcher
from tfdist_ext.errors import DataError

VARIABLE = "TFDIST_DATA_SERVICE"


@pytest.fixture(scope="module")
def service(four_cpus: None) -> Iterator[str]:
    """The address of a service with two workers."""
    import tensorflow as tf

    servers = tf.data.experimental.service
    dispatcher = servers.DispatchServer(servers.DispatcherConfig(protocol="grpc"))
    address = dispatcher.target.removeprefix("grpc://")
    config = servers.WorkerConfig(
        # Often, as the end of a worker waits for the next heartbeat: 30 s by default.
        dispatcher_address=address,
        protocol="grpc",
        heartbeat_interval_ms=200,
    )
    workers = [servers.WorkerServer(config) for _ in range(2)]
    yield dispatcher.target
    del workers


@pytest.fixture
def through(service: str) -> Callable[..., Any]:
    from tfdist_ext.data import through_service

    return lambda dataset, job_name=None, **options: through_service(
        dataset, job_name=job_name, **{"service": service, **options}
    )


def batches(start: int, stop: int, size: int = 3) -> Any:
    import tensorflow as tf

    return tf.data.Dataset.range(start, stop).batch(size)


def numbers(dataset: Any) -> list[int]:
    return sorted(int(x) for batch in dataset for x in batch)


def numbers_of_each(*datasets: Any) -> list[list[int]]:
    """Side by side, as the end of a pass takes a second."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(numbers, datasets))


def test_two_tasks_share_each_pass_whoever_is_ahead(through) -> None:
    first, second = (through(batches(0, 100), "shared") for _ in range(2))
    begun = iter(second)
    taken = [int(x) for _ in range(4) for x in next(begun)]
    of_first = [numbers(first) for _ in range(2)]  # it ends pass 1, and is through pass 2
    taken += [int(x) for batch in begun for x in batch]
    assert sorted(of_first[0] + taken) == list(range(100))
    assert sorted(of_first[1] + numbers(second)) == list(range(100))
    assert of_first[0]
    assert of_first[1]


def test_what_the_data_set_looks_like(through, service: str) -> None:
    import tensorflow as tf

    before = batches(0, 20).map(lambda x: {"x": x, "y": tf.cast(x, tf.float32)[:, None]})
    after = through(before)
    assert after.element_spec == before.element_spec
    assert after.cardinality() == tf.data.UNKNOWN_CARDINALITY
    assert through(before.repeat()).cardinality() == tf.data.INFINITE_CARDINALITY
    sharding = after.options().experimental_distribute.auto_shard_policy
    assert sharding == tf.data.experimental.AutoShardPolicy.OFF
    sizes = [len(batch["x"]) for batch in through(before, service=None, env={VARIABLE: service})]
    assert sum(sizes) == 20
    assert sum(size < 3 for size in sizes) <= 2  # at most one a data worker


def test_an_unseeded_shuffle_gives_each_example_once_a_pass_and_other_orders(through) -> None:
    import tensorflow as tf

    data = through(tf.data.Dataset.range(50).shuffle(50).batch(5))
    passes = [[int(x) for batch in data for x in batch] for _ in range(2)]
    assert [sorted(p) for p in passes] == [list(range(50))] * 2
    assert passes[0] != passes[1]


def test_two_data_sets_of_a_program_are_two_jobs(through) -> None:
    first, second = through(batches(0, 10)), through(batches(50, 60))
    assert numbers_of_each(first, second) == [list(range(10)), list(range(50, 60))]


def test_an_evaluator_takes_nothing_away_from_the_training(through, monkeypatch) -> None:
    import itertools

    from tfdist_ext.data import service as module

    def job_of(task: str) -> Any:
        monkeypatch.setattr(module, "_numbers", itertools.count(1000))  # a process of its own
        cluster = {"worker": ["a:1", "b:1"], **({"evaluator": ["c:1"]} if task != "worker" else {})}
        config = {"cluster": cluster, "task": {"type": task, "index": 0}}
        return through(batches(0, 10), env={"TF_CONFIG": json.dumps(config)})

    both = job_of("worker"), job_of("evaluator")
    assert numbers_of_each(*both) == [list(range(10))] * 2


def test_a_program_that_starts_anew_goes_on_with_the_passes_of_the_last_one(through) -> None:
    assert numbers(through(batches(0, 10), "again")) == list(range(10))
    assert numbers(through(batches(0, 10), "again")) == []


def test_no_service_is_an_error_that_says_how_to_start_one(four_cpus: None) -> None:
    from tfdist_ext.data import through_service

    with pytest.raises(DataError, match=r"tfdist run --data-workers 2 -- python script\.py"):
        through_service(batches(0, 10), env={})
    with pytest.raises(DataError, match=rf"{VARIABLE} must be .* got 'node1:5000'"):
        through_service(batches(0, 10), env={VARIABLE: "node1:5000"})


def test_a_dispatcher_that_is_not_there(four_cpus: None) -> None:
    from tfdist_ext.data import through_service

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(DataError, match=rf"host 127\.0\.0\.1, port {port} within 0\.3 s"):
        through_service(batches(0, 10), service=f"grpc://127.0.0.1:{port}", wait=0.3)


@pytest.mark.parametrize("kind", ["numpy_function", "py_function", "from_generator"])
def test_python_in_the_data_set_is_refused(through, kind: str) -> None:
    import tensorflow as tf

    if kind == "from_generator":
        spec = tf.TensorSpec([], tf.int64)
        dataset = tf.data.Dataset.from_generator(lambda: range(9), output_signature=spec)
    else:
        call = getattr(tf, kind)
        dataset = tf.data.Dataset.range(9).map(lambda x: call(np.negative, [x], tf.int64))
    with pytest.raises(DataError, match="set must run without Python functions, got"):
        through(dataset.batch(3))


def test_what_is_no_data_set_and_no_name(through) -> None:
    with pytest.raises(DataError, match=r"must be a tf\.data\.Dataset, got \[1, 2\]"):
        through([1, 2])
    for name in ("", 3):
        with pytest.raises(DataError, match="job_name must be a text"):
            through(batches(0, 10), name)


@pytest.mark.parametrize(
    ("given", "address"),
    [
        ("grpc://10.0.0.5:5000", "10.0.0.5:5000"),
        ("grpc://node-1.lan:5000", "node-1.lan:5000"),
        ("grpc://[::1]:5000", "[::1]:5000"),
    ],
)
def test_addresses(given: str, address: str) -> None:
    assert dispatcher_address(given) == address


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("node1:5000", "with its scheme"),
        ("http://node1:5000", "with its scheme"),
        (None, "got None"),
        ("grpc://node1", "has no port"),
        ("grpc://:5000", "has no host"),
        ("grpc://node1:99999", "got 'grpc://node1:99999'"),
        ("grpc://", "is blank"),
    ],
)
def test_addresses_that_are_none(given: Any, said: str) -> None:
    with pytest.raises(DataError, match=r'Write "grpc://host:port"') as caught:
        dispatcher_address(given)
    assert said in str(caught.value)


def test_a_dispatcher_that_comes_late_is_waited_for() -> None:
    import threading

    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        later = threading.Timer(0.5, server.listen)
        later.start()
        wait_for_dispatcher(f"127.0.0.1:{server.getsockname()[1]}", 10.0)
        later.join()


def test_a_process_that_cannot_serve_says_why_before_tensorflow_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        in_use = process("dispatcher", "--address", f"127.0.0.1:{port}")
    assert in_use.returncode == 1
    assert in_use.stderr.startswith(f"dispatcher: port {port} must be free, got ")
    wrong = process("worker", "--address", "localhost:1", "--dispatcher", "nowhere")
    assert wrong.returncode == 1
    assert wrong.stderr.startswith("worker: --")


def process(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tfdist_ext.data.service_process", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
