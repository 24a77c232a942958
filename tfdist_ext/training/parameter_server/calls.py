"""Remote calls on whatever worker is free, through TensorFlow's ClusterCoordinator.

Several global batches travel in one call (`ChunkCalls`).
"""

from __future__ import annotations

import itertools
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from tfdist_ext.errors import PeerError
from tfdist_ext.training.agreement.single_task import TaskStatus
from tfdist_ext.training.protocols import BatchIterator, Specs, Structure
from tfdist_ext.training.variables import default_strategy_scope

__all__ = [
    "BATCHES_IN_A_CALL",
    "Calls",
    "ChunkCalls",
    "ConcreteFunction",
    "busy_workers",
    "on_worker",
]

ConcreteFunction: TypeAlias = tf.types.experimental.ConcreteFunction

BATCHES_IN_A_CALL = 8  # at most


class Calls:
    """The workers of a cluster, as the coordinator calls them.

    A call whose worker dies is retried on another one.

    Args:
        peers: records the phases of this task.
    """

    def __init__(self, strategy: tf.distribute.Strategy, peers: TaskStatus):
        self.peers = peers
        self.coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        # The strategy does not list its workers.
        devices = (tf.DeviceSpec.from_string(d.name) for d in tf.config.list_logical_devices())
        self.workers = len({device.task for device in devices if device.job == "worker"})

    def results(self, calls: Iterable[tuple[ConcreteFunction, Sequence[Any]]]) -> list[Any]:
        """Make calls and wait for all of them.

        Args:
            calls: a function and its arguments for each call.

        Returns:
            The results as NumPy arrays, in the order of the calls.

        Raises:
            PeerError: a parameter server is gone.
            tf.errors.OpError: an operation of a call failed.
        """
        values = []
        try:
            try:
                for function, args in calls:
                    values.append(self.coordinator.schedule(function, args=args))
            finally:
                self._join()
        except tf.errors.UnavailableError as error:
            raise PeerError(
                "a parameter server does not answer, and its part of the model is lost:"
                f" {' '.join(str(error).split())[:300]} Start the cluster again, and resume from a"
                " checkpoint."
            ) from error
        except Exception as error:
            # TensorFlow wraps the error that it met while a worker made its data set.
            original = getattr(error, "original_exception", None)
            if original is None:
                raise
            raise original from None
        return [value.fetch() for value in values]

    def _join(self) -> None:
        try:
            self.coordinator.join()
        except KeyboardInterrupt:
            self.coordinator.join()  # steps that still run would change what comes next
            raise


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


class ChunkCalls:
    """Remote calls that each send several global batches to a function.

    Args:
        function: (batches, *further arguments) -> results, in a graph.
        specs: the specs of the further arguments.
    """

    def __init__(self, calls: Calls, function: Callable[..., Structure], *specs: tf.TensorSpec):
        self._calls = calls
        self._function = function
        self._specs = specs
        # By the number of batches, and the specs of a batch.
        self.traced: dict[tuple[int, str], ConcreteFunction] = {}

    def run(
        self,
        iterator: BatchIterator,
        n: int,
        most: int,
        arguments: Callable[[int], Sequence[Any]] = lambda done: (),
    ) -> tuple[int, int, list[Any]]:
        """Read `n` global batches, or fewer if the data ends, and call the function on them.

        Args:
            most: the number of batches in a call; the last calls have one batch each.
            arguments: returns the further arguments, from the number of batches before the call.

        Returns:
            (batches that were sent, batches that were read, results of the calls). A batch is not
            sent if all of its records are damaged.
        """
        done = read = 0

        def calls() -> Iterator[tuple[ConcreteFunction, Sequence[Any]]]:
            nonlocal done, read
            waiting: list[Structure] = []
            for ((rows, _, batch),) in itertools.islice(iterator, n):
                read += 1
                waiting += [batch] if int(rows) else []
                if len(waiting) == most:
                    yield self._on(iterator, most), (waiting, *arguments(done))
                    done, waiting = done + most, []
            for batch in waiting:
                yield self._on(iterator, 1), ([batch], *arguments(done))
                done += 1

        results = self._calls.results(calls())
        return done, read, results

    def _on(self, iterator: BatchIterator, batches: int) -> ConcreteFunction:
        """The function of this number of batches from this iterator."""
        ((_, _, structure),) = iterator.element_spec
        spec = keras.tree.map_structure(lambda s: s if hasattr(s, "shape") else None, structure)
        key = batches, str(spec)
        if key not in self.traced:
            self.traced[key] = on_worker(self._function, [spec] * batches, *self._specs)
        return self.traced[key]
