"""Remote calls on whatever worker is free, through TensorFlow's ClusterCoordinator.

Several global batches travel in one call (`BatchChunk`). An error of a call comes without what
its way back to the coordinator has added to it.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import keras
import tensorflow as tf

from tfdist_ext.errors import PeerError
from tfdist_ext.training.protocols import BatchIterator, Specs, Structure, TaskStatus
from tfdist_ext.training.variables import default_strategy_scope

__all__ = [
    "BATCHES_IN_A_CALL",
    "BatchChunk",
    "Calls",
    "ConcreteFunction",
    "batch_chunks",
    "batch_of",
    "busy_workers",
    "on_worker",
    "remote_errors_in_short",
    "root_message",
    "specs_of",
]


ConcreteFunction: TypeAlias = tf.types.experimental.ConcreteFunction


BATCHES_IN_A_CALL = 8  # at most


class Call:
    """Makes the calls of one execution, and keeps what they return, in the order of the calls."""

    def __init__(self, coordinator: tf.distribute.coordinator.ClusterCoordinator):
        self._coordinator = coordinator
        self._results: list[tf.distribute.coordinator.RemoteValue] = []

    def __call__(self, function: ConcreteFunction, *args: Any) -> None:
        self._results.append(self._coordinator.schedule(function, args=args))

    def results(self) -> Iterator[Any]:
        """The results of the calls, as NumPy arrays. TensorFlow has copied them here already."""
        for result in self._results:
            yield keras.tree.map_structure(
                lambda value: value.numpy() if isinstance(value, tf.Tensor) else value,
                result.fetch(),
            )


class Calls:
    """The workers of a cluster, as the coordinator calls them.

    A call whose worker dies is retried on another one.

    Args:
        peers: notes the phases of this task.
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
            tf.errors.OpError: an operation of a call failed; named in one line.
        """
        try:
            with remote_errors_in_short():
                try:
                    yield Call(self.coordinator)
                finally:
                    try:
                        self._wait()
                    except KeyboardInterrupt:
                        self._wait()  # what is under way would disturb what comes next
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

    TensorFlow's coordinator has a thread for each, which waits in `_process_closure`.
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
    """The function traced as workers run it: no strategy in sight, each worker a device."""
    with default_strategy_scope():
        return tf.function(function, autograph=False).get_concrete_function(*specs)


def _worker_tasks() -> int:
    """Workers that this process is connected to; the strategy does not tell."""
    devices = (tf.DeviceSpec.from_string(d.name) for d in tf.config.list_logical_devices())
    return len({device.task for device in devices if device.job == "worker"})


# The message of an operation stands before its name. Operations that were given up do not count.
_FAILED = re.compile(r"^(?!.*\bCANCELLED\b)(.*\S)\s*\n\s*\[\[.*?\{\{node ([^}]*)\}\}", re.MULTILINE)


_BEFORE = re.compile(r"^\s*(\(\d+\)\s*)?([A-Z_]+:)?\s*(\{\{function_node [^}]*\}\})?\s*")


# Of the traceback of the operation, where it was made.
_OF_USER = re.compile(
    r"^ *File \"((?!.*/site-packages/|.*/tfdist_ext/|<)[^\"]*\", line \d+)", re.MULTILINE
)


def root_message(text: str) -> str:
    """The message of the operation that failed first, and the operation's name.

    TensorFlow's own repeats it once for each task that passed it on.
    """
    found = _FAILED.search(text)
    if found is None:
        return text.split("\nAdditional GRPC error information", 1)[0].strip()
    message = f"{_BEFORE.sub('', found[1])} [operation: {found[2]}]"
    traceback = text.split("Detected at node", 2)[1:2]
    lines = _OF_USER.findall(traceback[0]) if traceback else []
    return f'{message}, made at "{lines[-1]}' if lines else message


@contextlib.contextmanager
def remote_errors_in_short() -> Iterator[None]:
    """Scope in which an error of TensorFlow's says what failed, in one line."""
    try:
        yield
    except Exception as error:
        # TensorFlow wraps an error that was met while a worker made its data set.
        original: Any = getattr(error, "original_exception", error)
        if not isinstance(original, tf.errors.OpError):
            raise
        raise type(original)(
            original.node_def, original.op, root_message(original.message)
        ) from None


class BatchChunk(NamedTuple):
    """Global batches of one call; an empty chunk is a step without data.

    Attributes:
        tensors: the batches, one after another in each tensor.
        ends: the row at which each batch ends.
    """

    tensors: list[tf.Tensor]
    ends: list[int]


def batch_chunks(iterator: BatchIterator, n: int, most: int) -> Iterator[BatchChunk]:
    """`n` global batches, or fewer where the data ends, at most `most` in a chunk.

    Batches go together where their rows are of the same shape, however many they are.
    """
    waiting: list[list[tf.Tensor]] = []
    for _ in range(n):
        try:
            (part,) = next(iterator)
        except (StopIteration, tf.errors.OutOfRangeError):
            break
        if not int(part[0]):  # all of its records are damaged
            yield BatchChunk([], [])
            continue
        tensors = _tensors(part[-1])
        if waiting and (len(waiting) == most or not _go_together(waiting[0], tensors)):
            yield from _packed(waiting, most)
            waiting = []
        waiting.append(tensors)
    yield from _packed(waiting, most)


def specs_of(iterator: BatchIterator) -> tuple[Specs, list[tf.TypeSpec]]:
    """(structure of a global batch, specs of its tensors) that `batch_of` and `BatchChunk` use."""
    (part,) = iterator.element_spec
    return part[-1], _tensors(part[-1])


def batch_of(
    structure: Specs, tensors: Sequence[tf.Tensor], ends: tf.Tensor, number: int, batches: int
) -> Structure:
    """One global batch out of a chunk, in its own structure."""
    if batches > 1:
        start = ends[number - 1] if number else 0
        tensors = [tensor[start : ends[number]] for tensor in tensors]
    left = iter(tensors)
    return keras.tree.map_structure(lambda spec: None if spec is None else next(left), structure)


def _tensors(batch: Structure | Specs) -> list[Any]:
    return [leaf for leaf in keras.tree.flatten(batch) if leaf is not None]


def _go_together(one: Sequence[tf.Tensor], other: Sequence[tf.Tensor]) -> bool:
    return all(
        isinstance(a, tf.Tensor)
        and isinstance(b, tf.Tensor)
        and a.shape.rank > 0
        and a.shape[1:] == b.shape[1:]
        and (a.shape[0], b.shape[0]) == (one[0].shape[0], other[0].shape[0])
        for a, b in zip(one, other, strict=True)
    )


def _packed(batches: list[list[tf.Tensor]], most: int) -> Iterator[BatchChunk]:
    """One chunk of `most` batches, or one for each: two sizes, so two functions to compile."""
    if len(batches) < most or most == 1:
        yield from (BatchChunk(tensors, [0]) for tensors in batches)
    else:
        ends = list(itertools.accumulate(int(tensors[0].shape[0]) for tensors in batches))
        yield BatchChunk([tf.concat(each, axis=0) for each in zip(*batches, strict=True)], ends)
