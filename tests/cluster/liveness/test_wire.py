"""The endpoint of a task, and what happens when TensorFlow's server takes its port."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from tfdist_ext.cluster.liveness.wire import Endpoint


@pytest.fixture
def endpoint() -> Iterator[tuple[Endpoint, int]]:
    """An endpoint and its port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    made = Endpoint(f"127.0.0.1:{port}", lambda _: {})
    yield made, port
    made.close()


def test_an_early_client_of_tensorflow_gets_the_answer_of_its_server(
    endpoint: tuple[Endpoint, int],
) -> None:
    """A coordinator that takes no part in the preflight connects while the endpoint listens."""
    early, port = endpoint
    with (
        grpc.insecure_channel(f"127.0.0.1:{port}") as channel,
        ThreadPoolExecutor(2) as pool,
    ):
        call = channel.unary_unary("/tensorflow.WorkerService/GetStatus")
        answer = pool.submit(call, b"", timeout=30.0)
        with pytest.raises(TimeoutError):
            answer.result(1.0)
        early.free_port()
        handler = grpc.unary_unary_rpc_method_handler(lambda request, _: b"status" + request)
        handlers = grpc.method_handlers_generic_handler(
            "tensorflow.WorkerService", {"GetStatus": handler}
        )
        server = grpc.server(pool, handlers=[handlers])
        server.add_insecure_port(f"[::]:{port}")
        server.start()
        assert answer.result(30.0) == b"status"
        assert call(b"!", timeout=30.0) == b"status!"
        server.stop(0.0).wait()


def test_a_process_ends_while_an_early_client_waits() -> None:
    """A call that stays in a thread would keep Python from its exit."""
    program = """
import socket, threading, time, grpc
from tfdist_ext.cluster.liveness.wire import Endpoint
with socket.create_server(("127.0.0.1", 0)) as free:
    port = free.getsockname()[1]
endpoint = Endpoint(f"127.0.0.1:{port}", lambda _: {})
channel = grpc.insecure_channel(f"127.0.0.1:{port}")
call = channel.unary_unary("/tensorflow.WorkerService/GetStatus").future(b"", timeout=60.0)
time.sleep(1.0)
endpoint.close()
print(call.exception().code())
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], timeout=30, check=True, capture_output=True, text=True
    )
    assert "StatusCode" in ended.stdout
