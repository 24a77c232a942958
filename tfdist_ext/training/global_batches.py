"""A sequence of global batches, cut into one contiguous part for each replica."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

__all__ = ["GlobalBatches", "PartsOf"]

# (first replica, local ones, all of them) -> for each step a tuple of the local replicas' parts,
# each (how many rows, of how many in the global batch, the rows themselves); see _spans for a part
# of 0 rows.
PartsOf = Callable[[int, int, int], tf.data.Dataset]


@dataclass
class GlobalBatches:
    """One pass after another over a sequence of global batches.

    A `BatchSource`, whose attributes it has.

    Attributes:
        parts_of: makes the parts of some replicas.
        from_step: gives the parts from a later global batch on; None where only reading leads
            there.
        at_position: the same from where the data's own position is; None where it keeps none.
        agreed: how many rows the global batch has is known only when those of all parts are
            counted. In the place of that number a part says 1 then, or 0 where it is no batch of
            the data; the pass is over when all say so.
        spec: of one global batch, where `parts_of` need not be asked.
    """

    parts_of: PartsOf
    steps: int | None
    batch_size: int | None
    endless: bool
    on_epoch_begin: Callable[[], None]
    on_epoch_end: Callable[[], None]
    from_step: Callable[[int], PartsOf] | None = None
    begin: int = 0
    advance: Callable[[int], None] = lambda steps: None
    ended: Callable[[], None] = lambda: None
    at_position: Callable[[], GlobalBatches] | None = None
    agreed: bool = False
    spec: Any = None
    dataset: tf.data.Dataset | None = None
    arrays: Any = None

    @property
    def element_spec(self) -> Any:
        """The structure of one global batch, batch dimension unknown."""
        spec = self.spec or self.parts_of(0, 1, 1).element_spec[0][2]
        # What the data leaves out (y, weights) is None in each batch, and has a spec of its own.
        return keras.tree.map_structure(lambda s: s if hasattr(s, "shape") else None, spec)

    def distributed(self, strategy: tf.distribute.Strategy) -> Any:
        """A distributed dataset: each element holds one part for each local replica."""

        def pipeline(context: tf.distribute.InputContext | None) -> tf.data.Dataset:
            context = context or tf.distribute.InputContext()
            replicas = context.num_replicas_in_sync
            local = replicas // context.num_input_pipelines
            parts = self.parts_of(context.input_pipeline_id * local, local, replicas)
            return _one_by_one(parts, local).prefetch(tf.data.AUTOTUNE)

        return strategy.distribute_datasets_from_function(pipeline)

    def on_host(self, first: int, local: int, replicas: int) -> tf.data.Dataset:
        """A plain dataset: each element is the tuple of this task's replicas' parts.

        For replicas on CPUs, where nothing is to be moved. TensorFlow's distributed iterator
        costs more than a small step there.
        """
        return self.parts_of(first, local, replicas).prefetch(tf.data.AUTOTUNE)


def _one_by_one(parts: tf.data.Dataset, local: int) -> tf.data.Dataset:
    if local == 1:
        return parts.map(lambda part: part)
    return parts.flat_map(
        lambda *each: functools.reduce(
            lambda left, right: left.concatenate(right),
            [tf.data.Dataset.from_tensors(part) for part in each],
        )
    )
