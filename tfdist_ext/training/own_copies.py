"""A replica's own copies of variables, for what its step writes inside a cond or a loop.

On mirrored strategies the replica's copy of the variable serves: it is unlike the others' until the
step ends and the mean over all rows is written to all of them. In central storage there is one copy
for all replicas, so each gets a variable beside it.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import tensorflow as tf

from tfdist_ext.errors import TrainingError
from tfdist_ext.training import _keras_private as kp
from tfdist_ext.training.copies import copies_per_worker, local_copy

__all__ = ["OwnCopies"]


class OwnCopies:
    """The copies of one program, kept from step to step.

    Args:
        local_replicas: replicas of this worker.
    """

    def __init__(self, strategy: tf.distribute.Strategy, local_replicas: int):
        self._strategy = strategy
        self._local_replicas = local_replicas
        self._beside: dict[tuple[int, int], tf.Variable] = {}
        self.written: dict[int, Any] = {}  # id -> variable that steps write in inner graphs

    def is_apart(self, variable: Any) -> bool:
        """Whether the replica's copy is another variable than the one that steps start from."""
        return not variable.trainable and self._is_shared(variable)

    def of(self, variable: Any) -> Any:
        """What to read and assign on the replica that runs."""
        if isinstance(self._strategy, tf.distribute.TPUStrategy):
            return kp.raw_value(variable)  # copies cannot be had one by one there
        number = tf.distribute.get_replica_context().replica_id_in_sync_group
        number = int(tf.get_static_value(number)) % self._local_replicas
        if not self.is_apart(variable):
            return local_copy(variable, self._strategy, number)
        key = id(variable), number
        if key not in self._beside:
            # A new thread is outside of all scopes and graphs that are open in this one.
            with ThreadPoolExecutor(1) as thread:
                self._beside[key] = thread.submit(_like, variable).result()
        return self._beside[key]

    def write(self, variable: Any, value: Any) -> None:
        """Assign inside an inner graph.

        Raises:
            TrainingError: a trained weight of which all replicas have one copy.
        """
        if variable.trainable and self._is_shared(variable):
            raise TrainingError(
                f"the step assigns to the trainable variable {variable.path!r} inside a"
                " tf.function, a cond or a loop of its own, where"
                f" {type(self._strategy).__name__}, whose replicas share one copy of it, cannot."
                " Assign to it directly in the body of train_step or call (tf.where chooses a"
                " value without a cond), or create it with trainable=False."
            )
        copy = self.of(variable)
        copy.assign(tf.cast(value, copy.dtype))
        self.written[id(variable)] = variable

    def _is_shared(self, variable: Any) -> bool:
        """Whether the replicas of this worker have one copy together."""
        if self._local_replicas == 1 or isinstance(self._strategy, tf.distribute.TPUStrategy):
            return False
        return copies_per_worker(variable, self._strategy) < self._local_replicas


def _like(variable: Any) -> tf.Variable:
    raw = kp.raw_value(variable)
    with tf.device("CPU:0"):
        return tf.Variable(tf.zeros(raw.shape, raw.dtype), trainable=False)
