"""Whether a function's data set can be made on a worker, in a process that is not this one."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist_ext.data.function import FunctionDataset
from tfdist_ext.data.shards import Shard

__all__ = ["what_keeps_here"]

_CALLS_PYTHON = ("PyFunc", "PyFuncStateless", "EagerPyFunc")


def what_keeps_here(data: FunctionDataset, shard: Shard) -> str:
    """Why only this process can read the data, in words; "" where any can.

    Workers are sent graphs and tensors: no data set that is there already, and no Python function.
    """
    if data.takes_epoch:
        return "its function has an argument epoch, so it is called for each epoch"
    traced = tf.function(
        lambda: tf.data.experimental.to_variant(data.made(shard, alone=True)), autograph=False
    ).get_concrete_function()
    if any(tensor.dtype == tf.variant for tensor in traced.captured_inputs):
        return "its data set is made outside of the function; make it inside"
    if any(node.op in _CALLS_PYTHON for node in _nodes(traced)):
        return "it calls Python (from_generator, py_function, numpy_function)"
    return ""


def _nodes(traced: Any) -> list[Any]:
    graph = traced.graph.as_graph_def()
    return [
        *graph.node,
        *(node for function in graph.library.function for node in function.node_def),
    ]
