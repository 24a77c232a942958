"""Whether a function's data set can be made on a worker, in a process that is not this one."""

from __future__ import annotations

import tensorflow as tf

from tfdist_ext.data.function import FunctionDataset
from tfdist_ext.data.python_calls import python_calls
from tfdist_ext.data.shards import Shard

__all__ = ["what_keeps_here"]


def what_keeps_here(data: FunctionDataset, shard: Shard) -> str:
    """Why only this process can read the data, in words; "" where any can.

    Workers are sent graphs and tensors: no data set that is there already, and no Python function.
    """
    if data.takes_epoch:
        return "its function has an argument epoch, so it is called for each epoch"
    if data.service is not None:
        return "its batches come from a tf.data service, to whoever asks first"
    traced = tf.function(
        lambda: tf.data.experimental.to_variant(data.made(shard, alone=True)), autograph=False
    ).get_concrete_function()
    if any(tensor.dtype == tf.variant for tensor in traced.captured_inputs):
        return "its data set is made outside of the function; make it inside"
    if python_calls(data.made(shard, alone=True)):
        return "it calls Python (from_generator, py_function, numpy_function)"
    return ""
