"""tf.data pipelines: without the tuner, and what of them runs in this process alone."""

from __future__ import annotations

import tensorflow as tf

__all__ = [
    "find_py_functions",
    "find_py_functions_in_graph",
    "operations_of",
    "without_autotune",
]

_OPERATIONS = {"PyFunc", "PyFuncStateless", "EagerPyFunc"}


def without_autotune(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """The data set without tf.data's tuner, for pipelines where there is nothing to choose.

    The tuner sleeps for twice as long each time, up to a minute, and now and then misses that its
    iterator has come to an end; then whoever lets go of the iterator waits until it wakes up
    (docs/tensorflow_facts.md). AUTOTUNE stands for the number of cores here, at most 16.
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


def find_py_functions(dataset: tf.data.Dataset) -> list[str]:
    """The operations that call Python: of from_generator, numpy_function, py_function."""
    return sorted(operations_of(dataset) & _OPERATIONS)


def find_py_functions_in_graph(graph: tf.compat.v1.GraphDef) -> list[str]:
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
