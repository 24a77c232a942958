"""Remote calls on whatever worker is free, through TensorFlow's ClusterCoordinator."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist_ext.errors import TrainingError
from tfdist_ext.training.coordinated.remote_errors import remote_errors_in_short
from tfdist_ext.training.copies import outside_of_strategies

__all__ = ["Call", "Calls", "on_worker"]


class Call:
    """Makes the calls of one execution, and keeps what they return, in the order of the calls."""

    def __init__(self, coordinator: Any):
        self._coordinator = coordinator
        self._results: list[Any] = []

    def __call__(self, function: Any, args: Sequence[Any]) -> None:
        self._results.append(self._coordinator.schedule(function, args=tuple(args)))

    def results(self) -> Iterator[Any]:
        """What each call returned, as NumPy arrays. TensorFlow has copied it here already."""
        for result in self._results:
            yield keras.tree.map_structure(_array, result.fetch())


class Calls:
    """The workers of a cluster, as the coordinator calls them.

    A call whose worker dies is made again on another one.
    """

    def __init__(self, strategy: tf.distribute.Strategy, silence: float = 60.0):
        """`silence`: seconds without an answer from any worker after which there is a warning."""
        self.coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        self.workers = _worker_tasks()
        self._silence = silence

    @contextlib.contextmanager
    def all_done(self) -> Iterator[Call]:
        """Scope that ends when every call made in it has returned.

        Raises:
            TrainingError: a parameter server is gone.
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
            raise TrainingError(
                "a parameter server does not answer, and its part of the model is lost:"
                f" {' '.join(str(error).split())[:300]} Start the cluster again, and go on from a"
                " checkpoint."
            ) from error

    def _wait(self) -> None:
        pause, silent_since = 0.0002, time.monotonic()
        while not self.coordinator.done():
            time.sleep(pause)
            pause = min(pause * 2, 0.005)
            if time.monotonic() - silent_since > self._silence:
                warnings.warn(
                    f"no worker has finished its calls for {self._silence:.0f} s; waiting. Are the"
                    " worker processes alive?",
                    stacklevel=2,
                )
                silent_since = time.monotonic()


def on_worker(function: Any, *specs: Any) -> Any:
    """The function traced as workers run it: no strategy in sight, each worker a device."""
    with outside_of_strategies():
        return tf.function(function, autograph=False).get_concrete_function(*specs)


def _worker_tasks() -> int:
    """Workers that this process is connected to; the strategy does not tell."""
    devices = (tf.DeviceSpec.from_string(d.name) for d in tf.config.list_logical_devices())
    return len({device.task for device in devices if device.job == "worker"})


def _array(value: Any) -> Any:
    return value.numpy() if isinstance(value, tf.Tensor) else value
