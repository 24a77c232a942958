"""Random numbers without a seed, in steps: `keras.random.normal(shape)` in a layer's call.

Keras draws them from one generator of the calling thread, and would make a new one in the thread of
each replica, inside of the step. So each replica has one from the beginning: a plain variable of
its own that its steps advance, alike on all replicas of all workers.
"""

from __future__ import annotations

import functools
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import keras
import tensorflow as tf

from tfdist_ext.training import _keras_private as kp
from tfdist_ext.training.protocols import StepFunction
from tfdist_ext.training.reduction import SynchronousReduction

__all__ = ["Seeds"]


class Seeds:
    """The generators of a model's replicas on this worker; none where Keras's own serves."""

    def __init__(self, strategy: tf.distribute.Strategy, reduction: SynchronousReduction):
        self._strategy = strategy
        self._reduction = reduction
        self._generators: list[keras.random.SeedGenerator] | None = None

    def around(self, step: StepFunction) -> StepFunction:
        """The same step, drawing from the generator of the replica that runs it.

        Every worker must call, where it may be the first time.
        """
        if self._generators is None:
            self._generators = self._made()
        if not (generators := self._generators):
            return step

        @functools.wraps(step)
        def seeded(*args: Any) -> Any:
            number = tf.distribute.get_replica_context().replica_id_in_sync_group
            number = int(tf.get_static_value(number)) % len(generators)
            with kp.global_seed_generator(generators[number]):
                return step(*args)

        return seeded

    def _made(self) -> list[keras.random.SeedGenerator]:
        if isinstance(self._strategy, tf.distribute.TPUStrategy):
            return []  # steps cannot write what was made outside; they run in the calling thread
        try:
            devices = list(self._strategy.extended.worker_devices)
        except RuntimeError:  # the default strategy: one replica, in the calling thread
            return []
        # From Python's random numbers, as Keras takes seeds.
        seed = int(self._reduction.from_chief(random.randint(1, 2**31 - 1)))
        # A new thread is outside of all scopes and graphs that are open in this one.
        with ThreadPoolExecutor(1) as thread:
            return list(thread.map(lambda device: _generator(seed, device), devices))


def _generator(seed: int, device: str) -> keras.random.SeedGenerator:
    with tf.device(device):
        return keras.random.SeedGenerator(seed)
