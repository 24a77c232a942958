"""Remote calls on whatever worker is free, through TensorFlow's ClusterCoordinator.

Several global batches travel in one call (`BatchChunk`).
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import keras
import tensorflow as tf

from tfdist_ext.errors import PeerError
from tfdist_ext.training.agreement.single_task import TaskStatus
from tfdist_ext.training.protocols import BatchIterator, Specs, Structure
from tfdist_ext.training.variables import default_strategy_scope

__all__ = [
    "BATCHES_IN_A_CALL",
    "BatchChunk",
    "Calls",
    "ConcreteFunction",
    "batch_chunks",
    "busy_workers",
    "chunk_specs",
    "on_worker",
    "unstacked",
]
ConcreteFunction: TypeAlias = tf.types.experimental.ConcreteFunction

BATCHES_IN_A_CALL = 8  # at most


class Call:
    """Schedules the calls of one execution, and keeps their results in the order of the calls."""

    def __init__(self, coordinator: tf.distribute.coordinator.ClusterCoordinator):
        self._coordinator = coordinator
        self._results: list[tf.distribute.coordinator.RemoteValue] = []

    def __call__(self, function: ConcreteFunction, *args: Any) -> None:
        self._results.append(self._coordinator.schedule(function, args=args))

    def results(self) -> Iterator[Any]:
        """The results of the calls, as NumPy arrays. TensorFlow has already copied them here."""
        for result in self._results:
            yield keras.tree.map_structure(
                lambda value: value.numpy() if isinstance(value, tf.Tensor) else value,
                result.fetch(),
            )


class Calls:
    """The workers of a cluster, as the coordinator calls them.

    A call whose worker dies is retried on another one.

    Args:
        peers: records the phases of this task.
    """

    def __init__(self, strategy: tf.distribute.Strategy, peers: TaskStatus):
        self.peers = peers
        self.coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        self.workers = _worker_tasks()

    @contextlib.contextmanager
    def joined(self) -> Iterator[Call]:
        """Scope that ends when every call made in it has returned.

        Raises:
            PeerError: a parameter server is gone.
            tf.errors.OpError: an operation of a call failed.
        """
        try:
            with _original_errors():
                try:
                    yield Call(self.coordinator)
                finally:
                    try:
                        self._wait()
                    except KeyboardInterrupt:
                        self._wait()  # running steps would change what comes next
                        raise
        except tf.errors.UnavailableError as error:
            raise PeerError(
                "a parameter server does not answer, and its part of the model is lost:"
                f" {' '.join(str(error).split())[:300]} Start the cluster again, and resume from a"
                " checkpoint."
            ) from error

    def _wait(self) -> None:
        pause = 0.0002
        while not self.coordinator.done():
            time.sleep(pause)
            pause = min(pause * 2, 0.005)


def busy_workers() -> str:
    """The workers that have not answered their calls, as "worker:0, worker:1"; "" for none.

    TensorFlow's coordinator has a thread for each worker. It waits in `_process_closure`.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    busy = []
    for identifier, frame in sys._current_frames().items():
        _, is_worker, number = names.get(identifier, "").rpartition("WorkerClosureProcessingLoop-")
        waits = any(at.name == "_process_closure" for at in traceback.extract_stack(frame))
        if is_worker and waits:
            busy.append(int(number))
    return ", ".join(f"worker:{number}" for number in sorted(busy))


def on_worker(function: Callable[..., Any], *specs: Specs) -> ConcreteFunction:
    """The function traced as workers run it: without a strategy, because a worker is one device."""
    with default_strategy_scope():
        return tf.function(function, autograph=False).get_concrete_function(*specs)


def _worker_tasks() -> int:
    """The number of workers that this process is connected to. The strategy does not list them."""
    devices = (tf.DeviceSpec.from_string(d.name) for d in tf.config.list_logical_devices())
    return len({device.task for device in devices if device.job == "worker"})


@contextlib.contextmanager
def _original_errors() -> Iterator[None]:
    """Scope that raises the error that TensorFlow met while a worker made its data set."""
    try:
        yield
    except Exception as error:
        original = getattr(error, "original_exception", None)
        if original is None:
            raise
        raise original from None


class BatchChunk(NamedTuple):
    """Global batches of one call.

    Attributes:
        tensors: those of a batch; if there are several batches, each tensor is a stack of theirs.
        batches: the number of batches; 0 for a step without data.
    """

    tensors: list[tf.Tensor]
    batches: int


def batch_chunks(iterator: BatchIterator, n: int, most: int) -> Iterator[BatchChunk]:
    """Yields `n` global batches, or fewer if the data ends, in chunks of `most` batches or of one.

    Two sizes of chunks need two functions. Only batches of the same shape are stacked.
    """
    waiting: list[list[tf.Tensor]] = []
    for _ in range(n):
        try:
            (part,) = next(iterator)
        except (StopIteration, tf.errors.OutOfRangeError):
            break
        if not int(part[0]):  # all of its records are damaged
            yield BatchChunk([], 0)
            continue
        tensors = _tensors(part[-1])
        if waiting and not _have_equal_shapes(waiting[0], tensors):
            yield from (BatchChunk(each, 1) for each in waiting)
            waiting = []
        waiting.append(tensors)
        if most > 1 and len(waiting) == most:
            yield BatchChunk([tf.stack(each) for each in zip(*waiting, strict=True)], most)
            waiting = []
        elif most == 1:
            yield BatchChunk(waiting.pop(), 1)
    yield from (BatchChunk(each, 1) for each in waiting)


def chunk_specs(iterator: BatchIterator, count: int) -> tuple[Specs, list[tf.TypeSpec]]:
    """Returns (structure of a global batch, specs of the tensors of a chunk of `count` batches)."""
    (part,) = iterator.element_spec
    specs = _tensors(part[-1])
    if count > 1:
        leading = tf.TensorShape([count])
        specs = [tf.TensorSpec(leading.concatenate(spec.shape), spec.dtype) for spec in specs]
    return part[-1], specs


def unstacked(structure: Specs, tensors: Sequence[tf.Tensor], count: int) -> list[Structure]:
    """In a graph: the global batches of a chunk, each in its own structure."""
    batches = [[tensor[i] for tensor in tensors] for i in range(count)] if count > 1 else [tensors]

    def structured(batch: Sequence[tf.Tensor]) -> Structure:
        left = iter(batch)
        return keras.tree.map_structure(
            lambda spec: None if spec is None else next(left), structure
        )

    return [structured(batch) for batch in batches]


def _tensors(batch: Structure | Specs) -> list[Any]:
    return [leaf for leaf in keras.tree.flatten(batch) if leaf is not None]


def _have_equal_shapes(one: Sequence[tf.Tensor], other: Sequence[tf.Tensor]) -> bool:
    """Whether two batches can be stacked: no ragged or sparse tensors, and equal shapes."""
    return all(
        isinstance(a, tf.Tensor) and isinstance(b, tf.Tensor) and a.shape == b.shape
        for a, b in zip(one, other, strict=True)
    )
