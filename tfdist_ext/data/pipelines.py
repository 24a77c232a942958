"""tf.data pipelines: their operations and errors, and the rows of their batches.

A batch is a structure of dense, sparse and ragged tensors, and None for a part that is left out.
Its rows are counted, cut, and padded with rows of sample weight 0. Losses and metrics stay exact
with padding if they are weighted means, as Keras's are.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from tfdist_ext.data.shards import Remainder, bounds, check_remainder
from tfdist_ext.errors import DataError

# Tensors in tuples, lists and dicts, as models take and return them. A tensor may be ragged or
# sparse, or a variable; None stands where one is left out.
Structure: TypeAlias = "tf.Tensor | Sequence[Structure] | Mapping[str, Structure] | None"

# The same structures of `tf.TypeSpec`s.
Specs: TypeAlias = "tf.TypeSpec | Sequence[Specs] | Mapping[str, Specs] | None"

# One replica's part of a global batch: the number of its rows, the number of rows of the global
# batch, and the rows. A part of 0 rows still holds one row: many operations fail, or return NaN, on
# no rows.
Part: TypeAlias = tuple[tf.Tensor, tf.Tensor, Structure]

# (first replica, local replicas, all replicas) -> a dataset of `tuple[Part, ...]`.
PartsOf: TypeAlias = Callable[[int, int, int], tf.data.Dataset]

# The operations that call Python: from_generator, numpy_function and py_function create them.
PY_FUNCTIONS = {"PyFunc", "PyFuncStateless", "EagerPyFunc"}

# What to do with a tensor of a batch that has no row for each example.
SHARED_TENSOR = (
    "If all examples share a tensor, give it to the model instead, as a non-trainable weight of a"
    ' layer: see "Tensors that all examples share" in docs/training.md.'
)


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


def parts_of_dataset(dataset: tf.data.Dataset, readers: int = 1) -> PartsOf:
    """The parts of a dataset of global batches.

    Args:
        readers: number of tasks that each read their own part of a global batch.
    """

    def parts_of(first: int, local: int, replicas: int) -> tf.data.Dataset:
        def parts(batch: Structure) -> tuple[Part, ...]:
            # Keras's generators put an empty Optional where a part of the batch is None.
            whole = tf.nest.map_structure(
                lambda part: None if isinstance(part, tf.experimental.Optional) else part, batch
            )
            if replicas * readers == 1:
                size = batch_size_of(whole)
                return ((size, size, in_own_memory(whole)),)
            size = checked_batch_size(whole, replicas * readers)

            def part(replica: int) -> Part:
                low, high = bounds(size, replica, replicas)
                rows = rows_between(whole, low, tf.maximum(high, low + 1))
                return high - low, size, in_own_memory(rows)

            return tuple(map(part, range(first, first + local)))

        return in_parallel(dataset, takes_elements(dataset, parts))

    return parts_of


def distributed(
    parts_of: PartsOf, strategy: tf.distribute.Strategy
) -> tf.distribute.DistributedDataset:
    """A distributed dataset: each element holds one part for each local replica."""

    def pipeline(context: tf.distribute.InputContext | None) -> tf.data.Dataset:
        context = context or tf.distribute.InputContext()
        replicas = context.num_replicas_in_sync
        local = replicas // context.num_input_pipelines
        parts = parts_of(context.input_pipeline_id * local, local, replicas)
        return parts.flat_map(_one_by_one).prefetch(tf.data.AUTOTUNE)

    return strategy.distribute_datasets_from_function(pipeline)


def _one_by_one(*parts: Part) -> tf.data.Dataset:
    datasets = map(tf.data.Dataset.from_tensors, parts)
    return functools.reduce(tf.data.Dataset.concatenate, datasets)


def without_prefetch(dataset: tf.data.Dataset) -> tf.data.Iterator:
    """An iterator that reads nothing ahead."""
    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = False
    with tf.device("CPU:0"):
        # Deleting the iterator would wait for its tuner; see `without_autotune`.
        return iter(without_autotune(dataset).with_options(options))


@tf.autograph.experimental.do_not_convert
def rest_of(iterator: tf.data.Iterator, steps: int | None) -> tf.data.Dataset:
    """The rest of an iterator, at most `steps` elements."""
    turns = tf.data.Dataset.range(2**62 if steps is None else steps)
    options = turns.map(lambda _: iterator.get_next_as_optional())
    there = options.take_while(lambda option: option.has_value())
    return there.map(lambda option: option.get_value())


def takes_elements(dataset: tf.data.Dataset, read: Callable[[Any], Any]) -> Callable[..., Any]:
    """A function for `dataset.map` and `flat_map` that calls `read` with each whole element.

    TensorFlow passes the parts of a tuple as arguments, also the one part of `((a, b),)`.
    """
    has_parts = type(dataset.element_spec) is tuple  # a named tuple is one argument

    @tf.autograph.experimental.do_not_convert
    def read_element(*parts: Any) -> Any:
        return read(parts if has_parts else parts[0])

    return read_element


def in_own_memory(batch: Any) -> Any:
    """Copies the tensors of a batch.

    The tensors of a generator share the memory of the user's NumPy arrays. A step may write its
    results into the memory of a tensor that nothing else needs.
    """

    def copied(part: Any) -> Any:
        is_data = part is not None and part.dtype not in (tf.variant, tf.resource)
        return tf.raw_ops.DeepCopy(x=part) if is_data else part

    return tf.nest.map_structure(copied, batch, expand_composites=True)


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
        match = re.search(r"\bDataError: (.*?)(\n+Traceback|\]\s*\[\[)", error.message, re.DOTALL)
        if match is None:
            raise
        message = match[1]
        if match[2][0] == "]":  # from an assertion in a graph, which escapes characters
            message = message.encode().decode("unicode_escape").encode("latin-1").decode()
        raise DataError(message) from None


def named_parts(batch: Any) -> Iterator[tuple[str, Any]]:
    """The tensors of a batch, or their specs, by name: "x['a']", "y", "sample_weight"."""

    def parts_of(name: str, part: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(part, Mapping | list | tuple):
            items = part.items() if isinstance(part, Mapping) else enumerate(part)
            for key, inner in items:
                yield from parts_of(f"{name}[{key!r}]", inner)
        elif getattr(part, "shape", None) is not None:
            yield name, part

    for name, part in zip(
        ("x", "y", "sample_weight"), batch if isinstance(batch, tuple) else (batch,), strict=False
    ):
        yield from parts_of(name, part)


def of_any_rows(spec: tf.TypeSpec) -> tf.TypeSpec:
    """The spec of a batch with an unknown number of rows."""
    if not getattr(getattr(spec, "shape", None), "rank", None):  # None, a scalar, or unknown
        return spec
    shape = [None, *spec.shape[1:]]
    if isinstance(spec, tf.SparseTensorSpec):
        return tf.SparseTensorSpec(shape, spec.dtype)
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensorSpec(shape, spec.dtype, spec.ragged_rank, spec.row_splits_dtype)
    return tf.TensorSpec(shape, spec.dtype)


def batch_size_of(batch: Any) -> tf.Tensor:
    """The number of rows (int64)."""
    part = next(part for part in tf.nest.flatten(batch) if part is not None)
    if isinstance(part, tf.SparseTensor):
        return part.dense_shape[0]
    if isinstance(part, tf.RaggedTensor):
        return tf.cast(part.nrows(), tf.int64)
    return tf.shape(part, out_type=tf.int64)[0]


def checked_batch_size(batch: Any, replicas: int) -> tf.Tensor:
    """The number of rows (int64). The graph fails with a DataError if tensors disagree."""
    size = batch_size_of(batch)
    names, tensors = zip(*named_parts(batch), strict=True)
    static = {tensor.shape[0] if tensor.shape.rank else None for tensor in tensors}
    if len(tensors) == 1 or (len(static) == 1 and None not in static):
        return size
    shapes = [_shape_of(tensor) for tensor in tensors]
    rows = tf.stack([tf.concat([shape, [-1]], axis=0)[0] for shape in shapes])

    def refuse() -> tf.Tensor:
        last_first = rows[::-1]  # if two sizes are as frequent, the size of the targets counts
        frequency = tf.reduce_sum(tf.cast(last_first[:, None] == last_first, tf.int32), axis=1)
        most = last_first[tf.argmax(frequency)]
        other = tf.argmax(tf.cast(rows != most, tf.int32))
        texts = [tf.strings.format("{}", shape, summarize=-1) for shape in shapes]
        message = tf.strings.join(
            [
                "DataError: ",
                tf.constant(names)[other],
                " has shape ",
                tf.strings.regex_replace(tf.stack(texts)[other], " ", ", "),
                " in a batch of ",
                tf.strings.as_string(most),
                f" examples. A batch is split by rows over {replicas} replicas, so each of its"
                f" tensors must have one row for each example. {SHARED_TENSOR}",
            ]
        )
        with tf.control_dependencies([tf.raw_ops.Assert(condition=False, data=[message])]):
            return tf.identity(size)

    return tf.cond(tf.reduce_all(rows == rows[0]), lambda: size, refuse)


def _shape_of(tensor: Any) -> tf.Tensor:
    if isinstance(tensor, tf.SparseTensor):
        return tensor.dense_shape
    if isinstance(tensor, tf.RaggedTensor):
        return tf.cast(tensor.bounding_shape(), tf.int64)
    return tf.shape(tensor, out_type=tf.int64)


def rows_between(batch: Any, low: Any, high: Any) -> Any:
    """The rows from low to before high (int64)."""

    def cut(part: Any) -> Any:
        if not isinstance(part, tf.SparseTensor):
            return None if part is None else part[low:high]
        rest = part.dense_shape[1:]
        start = tf.concat([[low], tf.zeros_like(rest)], axis=0)
        return tf.sparse.slice(part, start, tf.concat([[high - low], rest], axis=0))

    return tf.nest.map_structure(cut, batch)


def check_padded(remainder: Remainder, spec: Any) -> None:
    """Raise DataError unless this is a Remainder, and not PAD for examples without targets."""
    check_remainder(remainder)
    if remainder is Remainder.PAD and not (isinstance(spec, tuple) and len(spec) in (2, 3)):
        raise DataError(
            "examples must be (x, y) or (x, y, sample_weight) for Remainder.PAD, which marks rows"
            f" by sample weights, got {spec}."
        )


def padded(part: tuple[Any, ...], width: int) -> tuple[Any, ...]:
    """(x, y, sample_weight) of exactly `width` rows, from (x, y) or (x, y, sample_weight).

    The last row is repeated; an empty part gets rows of zeros.
    """
    there = tf.shape(tf.nest.flatten(part)[0])[0]
    numbers = tf.minimum(tf.range(width), tf.maximum(there - 1, 0))

    def filled(rows: tf.Tensor) -> tf.Tensor:
        taken = tf.gather(tf.concat([rows, _one_of_zeros(rows)], axis=0), numbers)
        return tf.ensure_shape(taken, [width, *rows.shape[1:]])

    real = tf.range(width) < there
    x, y, *weights = tf.nest.map_structure(filled, part)
    if not weights:
        return x, y, tf.cast(real, tf.float32)

    def marked(weight: tf.Tensor) -> tf.Tensor:
        weight = tf.cast(weight, tf.float32) if weight.dtype == tf.bool else weight
        shape = [width] + [1] * (weight.shape.rank - 1)
        return weight * tf.reshape(tf.cast(real, weight.dtype), shape)

    return x, y, tf.nest.map_structure(marked, weights[0])


def one_at_least(part: Any, rows: tf.Tensor) -> Any:
    """The part, or one row of zeros if all of its records were damaged."""
    return tf.cond(rows > 0, lambda: part, lambda: tf.nest.map_structure(_one_of_zeros, part))


def _one_of_zeros(rows: tf.Tensor) -> tf.Tensor:
    return tf.zeros([1, *tf.unstack(tf.shape(rows)[1:])], rows.dtype)
