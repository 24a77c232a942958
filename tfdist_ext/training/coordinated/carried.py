"""Whether a function's data set can be made on a worker, in a process that is not this one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist_ext.data.function import FunctionDataset
from tfdist_ext.data.pipelines import find_py_functions_in_graph
from tfdist_ext.data.shards import Shard

__all__ = ["captures_resources", "what_keeps_here", "what_keeps_made_here"]


def what_keeps_here(data: FunctionDataset, shard: Shard) -> str:
    """Why only this process can read the data, in words; "" where any can.

    Workers are sent graphs and tensors: no data set that is there already, and no Python function.
    """
    if data.takes_epoch:
        return "its function has an argument epoch, so it is called for each epoch"
    if data.service is not None:
        return "its batches come from a tf.data service, to whoever asks first"
    return what_keeps_made_here(lambda: data.made(shard, alone=True))


def what_keeps_made_here(make: Callable[[], tf.data.Dataset]) -> str:
    """The same of the data set that `make` returns."""
    traced = _traced(make)
    if tf.variant in _captured_dtypes(traced):
        return "its data set is made outside of the function; make it inside"
    if find_py_functions_in_graph(traced.graph.as_graph_def()):
        return "it calls Python (from_generator, py_function, numpy_function)"
    return ""


def captures_resources(make: Callable[[], tf.data.Dataset]) -> bool:
    """Whether the data set that `make` returns uses lookup tables or variables made outside."""
    return tf.resource in _captured_dtypes(_traced(make))


def _traced(make: Callable[[], tf.data.Dataset]) -> Any:
    return tf.function(
        lambda: tf.data.experimental.to_variant(make()), autograph=False
    ).get_concrete_function()


def _captured_dtypes(traced: Any) -> set[tf.DType]:
    return {tensor.dtype for tensor in traced.captured_inputs}
