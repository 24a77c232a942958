"""What of a data set runs in this process alone: Python functions, which no graph carries along."""

from __future__ import annotations

import tensorflow as tf

__all__ = ["operations_of", "python_calls", "python_calls_in"]

_OPERATIONS = {"PyFunc", "PyFuncStateless", "EagerPyFunc"}


def python_calls(dataset: tf.data.Dataset) -> list[str]:
    """The operations that call Python: of from_generator, numpy_function, py_function."""
    return sorted(operations_of(dataset) & _OPERATIONS)


def python_calls_in(graph: tf.compat.v1.GraphDef) -> list[str]:
    """The same of a graph in which a data set is made."""
    return sorted(_operations_in(graph) & _OPERATIONS)


def operations_of(dataset: tf.data.Dataset) -> set[str]:
    """The kinds of operations in a data set's graph and in its functions. Nothing is read."""
    graph = tf.compat.v1.GraphDef.FromString(
        tf.raw_ops.DatasetToGraphV2(
            input_dataset=tf.data.experimental.to_variant(dataset),
            external_state_policy=1,  # ignore: random numbers are no reason to warn
        ).numpy()
    )
    return _operations_in(graph)


def _operations_in(graph: tf.compat.v1.GraphDef) -> set[str]:
    nodes = [*graph.node, *(n for function in graph.library.function for n in function.node_def)]
    return {node.op for node in nodes}
