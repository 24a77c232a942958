"""TensorFlow's errors at the start of a cluster, with their causes in words."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import tensorflow as tf

from tfdist_ext.errors import StrategyError
from tfdist_ext.strategies.resolvers import Described

__all__ = ["start_failures_in_words"]


@contextlib.contextmanager
def start_failures_in_words(described: Described) -> Iterator[None]:
    """Raise StrategyError for those failures of the body whose cause is known."""
    try:
        yield
    except RuntimeError as error:
        if "program startup" not in str(error):
            raise
        raise StrategyError(
            "multi_worker_mirrored must be made before TensorFlow starts, got TensorFlow started"
            " already: an operation, a tensor, a model, a dataset or a list of devices came first."
            " Move create_strategy() to the top of the program, above the first of them."
        ) from error
    except (tf.errors.UnknownError, tf.errors.NotFoundError) as error:
        text = str(error)
        if "Could not start gRPC server" in text and described.task is not None:
            raise StrategyError(
                f"{described.task} cannot listen at {described.address}, the address from"
                f" {described.source}: the port is in use. Stop the process that uses it (this"
                " program, started before?), or give this task another port on every task."
            ) from error
        if "No server factory registered" in text:
            raise StrategyError(
                f"rpc_layer must be one of this TensorFlow, got another from {described.source}:"
                " leave it out, or write 'grpc'."
            ) from error
        raise
