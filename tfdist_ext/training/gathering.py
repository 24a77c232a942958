"""`tfd.all_rows`: the rows of the global batch, inside of a replica's step."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist_ext.training.part import part

__all__ = ["all_rows"]


def all_rows(x: Any) -> Any:
    """The rows of all replicas, in the order of the global batch.

    For what looks at more than one row at a time: losses over in-batch negatives (SimCLR, CLIP,
    retrieval), statistics over the batch (Barlow Twins), queues of features (MoCo, NNCLR). Use it
    in `call`, `train_step`, `test_step`, a loss or a metric; every replica must call it.

        z = tfd.all_rows(self.projector(x))      # (rows of the global batch, width)
        loss = contrastive_loss(z)               # the same number on each replica
        self.queue.assign(tf.concat([z, self.queue[: -tf.shape(z)[0]]], axis=0))

    It is differentiable. The gradient equals that of one device, whether each replica computes the
    loss of all rows, or the mean loss of its own rows against all rows.

    Args:
        x: a tensor of numbers or booleans, or a structure of them (tuples, lists, dicts, None).
            Axis 0 holds this replica's rows of the batch, one entry for each row: call it before
            rows are dropped, repeated or put together.

    Returns:
        The same structure. Axis 0 holds the rows of the global batch. Outside of a step, on one
        replica, and under ParameterServerStrategy (where a global batch is one worker's step), `x`
        as it is.

    Raises:
        TrainingError: not a dense tensor of numbers or booleans; a call inside of a tf.function, a
            cond or a loop of the step's own, where replicas cannot wait for each other.
        tf.errors.InvalidArgumentError: axis 0 has another length than this replica's rows.
    """
    here = part()
    if here is None or here.replicas == 1:
        return x
    values = tf.nest.flatten(x)
    given = [number for number, value in enumerate(values) if value is not None]
    for number, rows in zip(given, here.all_rows([values[n] for n in given]), strict=True):
        values[number] = rows
    return tf.nest.pack_sequence_as(x, values)
