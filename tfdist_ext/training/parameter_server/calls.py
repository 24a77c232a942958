"""Remote calls on whatever worker is free, through TensorFlow's ClusterCoordinator."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from tfdist_ext.data.batches import BatchIterator
from tfdist_ext.data.pipelines import Specs, Structure
from tfdist_ext.errors import PeerError
from tfdist_ext.training.agreement.task_status import Reduction, TaskStatus
from tfdist_ext.training.variables import default_strategy_scope

BATCHES_IN_A_CALL = 8  # at most

# A function, and its arguments.
Call: TypeAlias = tuple[tf.types.experimental.ConcreteFunction, Sequence[Any]]


class CoordinatorReduction(Reduction):
    """Of the coordinator alone, which reads global batches as they are."""

    @contextlib.contextmanager
    def call(self, name: str) -> Iterator[None]:
        """Scope of a public call.

        Raises:
            PeerError: a parameter server is gone. Its variables are read between steps, too.
        """
        with super().call(name), _names_lost_server():
            yield


@contextlib.contextmanager
def _names_lost_server() -> Iterator[None]:
    try:
        yield
    except tf.errors.UnavailableError as error:
        raise PeerError(
            "a parameter server does not answer, and its part of the model is lost:"
            f" {textwrap.shorten(str(error), 300)} Start the cluster again, and resume from a"
            " checkpoint."
        ) from error


def shorten_error(record: logging.LogRecord) -> bool:
    """Filter of a logger. The coordinator prints the batches of a failed call, in many lines."""
    if record.levelno >= logging.ERROR and record.module == "cluster_coordinator":
        text = textwrap.shorten(record.getMessage(), 500, placeholder=" ...")
        record.msg, record.args = text, ()
    return True


class Calls:
    """The workers of a cluster, as the coordinator calls them.

    A call whose worker dies is retried on another one.

    Args:
        peers: records the phases of this task.
    """

    def __init__(self, strategy: tf.distribute.Strategy, peers: TaskStatus):
        self.peers = peers
        tf.get_logger().addFilter(shorten_error)
        self.coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        # The strategy does not list its workers.
        devices = (tf.DeviceSpec.from_string(d.name) for d in tf.config.list_logical_devices())
        self.workers = len({device.task for device in devices if device.job == "worker"})

    def results(self, calls: Iterable[Call]) -> list[Any]:
        """Make calls and return their results as NumPy arrays, in the order of the calls.

        Raises:
            PeerError: a parameter server is gone.
            tf.errors.OpError: an operation of a call failed.
        """
        values = []
        try:
            with _names_lost_server():
                try:
                    for function, args in calls:
                        values.append(self.coordinator.schedule(function, args=args))
                    self.coordinator.join()
                except BaseException:
                    self.coordinator.join()  # steps that still run would change what comes next
                    raise
        except Exception as error:
            # TensorFlow wraps an error that occurs while a worker makes its dataset.
            original = getattr(error, "original_exception", None)
            if original is None:
                raise
            raise original from None
        return self.coordinator.fetch(values)

    def on_batches(
        self,
        function: tf.types.experimental.GenericFunction,
        iterator: BatchIterator,
        n: int,
        specs: Sequence[tf.TensorSpec] = (),
        arguments: Callable[[int, int], Sequence[Any]] = lambda done, steps: (),
    ) -> tuple[int, int, list[Any]]:
        """Read `n` global batches, or fewer if the data ends, and call the function on them.

        Several batches travel in one call.

        Args:
            function: (list of batches, *further arguments) -> results.
            specs: the specs of the further arguments.
            arguments: returns the further arguments, from the numbers of batches before the call
                and in it.

        Returns:
            (batches that were sent, batches that were read, results of the calls). A batch is not
            sent if all of its records are damaged.
        """
        done = read = 0
        # So that each worker has several calls. The batches that are left over travel alone.
        most = BATCHES_IN_A_CALL if n >= 4 * BATCHES_IN_A_CALL * self.workers else 1
        trace = functools.cache(functools.partial(traced_on_batches, function, iterator, specs))

        def calls() -> Iterator[Call]:
            nonlocal done, read
            waiting: list[Structure] = []
            for ((rows, _, batch),) in itertools.islice(iterator, n):
                read += 1
                waiting += [batch] if int(rows) else []
                if len(waiting) == most:
                    yield trace(most), (waiting, *arguments(done, most))
                    done, waiting = done + most, []
            for batch in waiting:
                yield trace(1), ([batch], *arguments(done, 1))
                done += 1

        results = self.results(calls())
        return done, read, results


def traced(
    function: tf.types.experimental.GenericFunction, *specs: Specs
) -> tf.types.experimental.ConcreteFunction:
    """A function traced as workers run it: without a strategy, because a worker is one device."""
    with default_strategy_scope():
        return function.get_concrete_function(*specs)


def traced_on_batches(
    function: tf.types.experimental.GenericFunction,
    iterator: BatchIterator,
    specs: Sequence[tf.TensorSpec],
    batches: int,
) -> tf.types.experimental.ConcreteFunction:
    """A function of a list of batches, traced for this number of batches of an iterator.

    Args:
        specs: the specs of the function's further arguments.
    """
    ((_, _, structure),) = iterator.element_spec
    spec = keras.tree.map_structure(lambda s: s if hasattr(s, "shape") else None, structure)
    return traced(function, [spec] * batches, *specs)
