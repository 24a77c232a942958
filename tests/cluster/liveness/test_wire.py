"""The endpoint of a task, and what happens when TensorFlow's server takes its port."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from tfdist_ext.cluster.liveness.wire import Endpoint
from tfdist_ext.launcher.resources import reserve_ports


def test_early_tensorflow_client_is_forwarded_to_the_server() -> None:
    """A coordinator connects again to a server that starts again, while the endpoint listens."""
    with reserve_ports(1) as (port,):
        early = Endpoint(f"127.0.0.1:{port}", dict)
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
    early.close()
