"""One process of a tf.data service: its dispatcher, or one of its workers.

    python -m tfdist_ext.data.service_process dispatcher --address node0:5000
    python -m tfdist_ext.data.service_process worker --dispatcher node0:5000 --address node1:5001

`tfdist run --data-workers N` starts these on one machine; on several, one command a machine does.
They end at SIGTERM and SIGINT, at once, and not before. Set CUDA_VISIBLE_DEVICES=-1 where there
are GPUs: nothing here computes on them.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Any

from tfdist_ext.data.service_address import dispatcher_address, wait_for_dispatcher
from tfdist_ext.errors import DataError

__all__ = ["main"]


def main(words: Sequence[str] | None = None) -> int:
    """Serve until a signal ends the process; 1 where that cannot begin."""
    options = _parser().parse_args(words)
    # The system's own way to end, which also works while TensorFlow starts, or is at work.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    try:
        server = _server(options)
    except DataError as error:
        print(f"{options.role}: {error}", file=sys.stderr, flush=True)
        return 1
    print(f"{options.role}: ready at {options.address}", flush=True)
    server.join()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tfdist_ext.data.service_process")
    roles = parser.add_subparsers(dest="role", required=True)
    dispatcher = roles.add_parser("dispatcher", help="deals out the examples; one a service")
    worker = roles.add_parser("worker", help="reads and prepares them; as many as you like")
    for role in (dispatcher, worker):
        role.add_argument(
            "--address",
            required=True,
            metavar="HOST:PORT",
            help="where the others reach this process; it listens at that port",
        )
    worker.add_argument("--dispatcher", required=True, metavar="HOST:PORT")
    worker.add_argument(
        "--wait", type=float, default=60.0, metavar="SECONDS", help="for the dispatcher (60)"
    )
    return parser


def _server(options: argparse.Namespace) -> Any:
    port = _free_port(options.address)
    if options.role == "worker":
        dispatcher = dispatcher_address(f"grpc://{options.dispatcher}", "--dispatcher")
    service = _tensorflow().data.experimental.service  # some seconds: the dispatcher starts too
    if options.role == "dispatcher":
        return service.DispatchServer(service.DispatcherConfig(port=port, protocol="grpc"))
    wait_for_dispatcher(dispatcher, options.wait)
    config = service.WorkerConfig(
        dispatcher_address=dispatcher,
        worker_address=options.address,
        port=port,
        protocol="grpc",
    )
    return service.WorkerServer(config)


def _free_port(address: str) -> int:
    port = int(dispatcher_address(f"grpc://{address}", "--address").rpartition(":")[2])
    # These servers share a port with whoever has it already, and then connections go to either.
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        raise DataError(f"port {port} must be free, got {error}. Give another one.") from None
    return port


def _tensorflow() -> Any:
    """TensorFlow, without the lines that it writes while it is imported, whatever one sets."""
    sys.stderr.flush()
    before = os.dup(2)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        import tensorflow
    finally:
        os.dup2(before, 2)
        os.close(before)
    return tensorflow


if __name__ == "__main__":
    sys.exit(main())
