"""What of a data set runs in this process alone: Python functions, which no graph carries along."""

from __future__ import annotations

import tensorflow as tf

__all__ = ["python_calls", "python_calls_in"]

_OPERATIONS = {"PyFunc", "PyFuncStateless", "EagerPyFunc"}


def python_calls(dataset: tf.data.Dataset) -> list[str]:
    """The operations that call Python: of from_generator, numpy_function, py_function."""
    graph = tf.compat.v1.GraphDef.FromString(
        tf.raw_ops.DatasetToGraphV2(
            input_dataset=tf.data.experimental.to_variant(dataset),
            external_state_policy=1,  # ignore: random numbers are no reason to warn
        ).numpy()
    )
    return python_calls_in(graph)


def python_calls_in(graph: tf.compat.v1.GraphDef) -> list[str]:
    """The same of a graph in which a data set is made."""
    nodes = [*graph.node, *(n for function in graph.library.function for n in function.node_def)]
    return sorted({node.op for node in nodes} & _OPERATIONS)
