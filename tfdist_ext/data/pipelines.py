"""tf.data pipelines: their tuner, their operations, and their errors."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdist_ext.errors import DataError

__all__ = [
    "PY_FUNCTIONS",
    "data_errors_as_raised",
    "in_parallel",
    "operations_in",
    "operations_of",
    "takes_elements",
    "without_autotune",
]

# The operations that call Python: from_generator, numpy_function and py_function create them.
PY_FUNCTIONS = {"PyFunc", "PyFuncStateless", "EagerPyFunc"}


def without_autotune(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """The dataset without tf.data's tuner.

    The tuner may miss that its iterator has ended, and then deleting the iterator takes up to a
    minute (docs/tensorflow_facts.md). AUTOTUNE means the number of cores then, at most 16.
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


def in_parallel(numbers: tf.data.Dataset, read: Callable[..., Any]) -> tf.data.Dataset:
    """The elements of the numbers, in their order, read in parallel without autotune."""
    return without_autotune(
        numbers.map(read, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
    )


def takes_elements(dataset: tf.data.Dataset, read: Callable[[Any], Any]) -> Callable[..., Any]:
    """A function for `dataset.map` and `flat_map` that calls `read` with each whole element.

    TensorFlow passes the parts of a tuple as arguments, also the one part of `((a, b),)`.
    """
    has_parts = type(dataset.element_spec) is tuple  # a named tuple is one argument

    @tf.autograph.experimental.do_not_convert
    def read_element(*parts: Any) -> Any:
        return read(parts if has_parts else parts[0])

    return read_element


def operations_of(dataset: tf.data.Dataset) -> set[str]:
    """The kinds of operations in a data set's graph and in its functions. Nothing is read."""
    graph = tf.compat.v1.GraphDef.FromString(
        tf.raw_ops.DatasetToGraphV2(
            input_dataset=tf.data.experimental.to_variant(dataset),
            external_state_policy=1,  # do not warn of random numbers
        ).numpy()
    )
    return operations_in(graph)


def operations_in(graph: tf.compat.v1.GraphDef) -> set[str]:
    """The kinds of operations in a graph, and in its functions."""
    nodes = [*graph.node, *(n for function in graph.library.function for n in function.node_def)]
    return {node.op for node in nodes}


@contextlib.contextmanager
def data_errors_as_raised() -> Iterator[None]:
    """Scope that raises a DataError that TensorFlow has wrapped in an error of its own."""
    try:
        yield
    except tf.errors.OpError as error:
        # TensorFlow's text, our message, and a Python traceback or the name of an operation.
        found = re.search(r"\bDataError: (.*?)(\n+Traceback|\]\s*\[\[)", error.message, re.DOTALL)
        if found is None:
            raise
        message = found[1]
        if found[2][0] == "]":  # from an assertion in a graph, which escapes characters
            message = message.encode().decode("unicode_escape").encode("latin-1").decode()
        raise DataError(message) from None
