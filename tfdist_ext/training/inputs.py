"""Whatever Keras accepts as data, as one sequence of global batches cut the same on every task.

Every task of a cluster is given the same data, as it would be on one device. A global batch is
cut into one contiguous part for each replica of the whole cluster, in replica order; a task
reads only the parts of its own replicas.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist_ext.data.order import Order, sorted_at_random
from tfdist_ext.data.ordered import OrderedDataset
from tfdist_ext.data.pipelines import without_autotune
from tfdist_ext.data.rows import rows_between, rows_in
from tfdist_ext.data.shards import bounds
from tfdist_ext.errors import TrainingError
from tfdist_ext.training import _keras_private as kp
from tfdist_ext.training.global_batches import GlobalBatches, PartsOf
from tfdist_ext.training.ordered_batches import OrderedBatches
from tfdist_ext.training.sharded_batches import batches_of_sharded

__all__ = ["GlobalBatches", "parts_of_dataset", "read"]

_NOT_FOR_KERAS_TO_SHUFFLE = (keras.utils.PyDataset, types.GeneratorType)


def read(
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    batch_size: int | None = None,
    steps: int | None = None,
    shuffle: bool | str = False,
    class_weight: dict[int, float] | None = None,
    seed: Callable[[], int] | None = None,
) -> GlobalBatches:
    """What `fit`, `evaluate` and `predict` take, as global batches.

    Args:
        x: arrays (or structures of them), a `tf.data.Dataset` of global batches, a
            `keras.utils.PyDataset`, a generator, or another source that Keras accepts; or a
            `tfd.data.ShardedDataset`.
        batch_size: examples in a global batch, where `x` is arrays (default 32).
        steps: global batches in an epoch, where the caller has asked for a number.
        shuffle: one new order for each pass, the same on every task: of all examples where `x` is
            arrays, of the batches where it is a finite `PyDataset`. "batch" is, for arrays, a new
            order of the examples within each batch, as Keras has it.
        seed: where that order starts, of data to train on; asked only when it is needed. Without
            it nothing is shuffled, an OrderedDataset neither, and its position plays no part.

    Raises:
        TrainingError: data that is distributed already, or not in batches.
        ValueError: what Keras itself refuses.
    """
    if isinstance(x, tf.distribute.DistributedDataset | tf.distribute.DistributedIterator):
        raise TrainingError(
            f"the data is distributed already: {type(x).__name__} arrived. Pass the tf.data.Dataset"
            " of global batches itself; it is cut for the replicas here."
        )
    if isinstance(x, OrderedDataset):
        return batches_of_sharded(
            x,
            beside=(y, sample_weight),
            batch_size=batch_size,
            class_weight=class_weight,
            going_on=seed is not None,
        )
    if all(part is None for part in keras.tree.flatten(x)):
        raise TrainingError(f"x must have data, got {x!r}.")
    is_dataset = kp.is_tf_dataset(x)
    adapter = kp.get_data_adapter(
        x,
        y,
        sample_weight,
        batch_size=batch_size,
        steps_per_epoch=steps,
        # Keras warns of a shuffle that it will not do; the default of `fit` should not. And the
        # order that it gives to a PyDataset is another one on every task.
        shuffle=False if is_dataset or isinstance(x, _NOT_FOR_KERAS_TO_SHUFFLE) else shuffle,
        class_weight=class_weight,
    )
    if isinstance(adapter, kp.ArrayDataAdapter):
        within_batches = isinstance(shuffle, str) and shuffle == "batch"
        with tf.device("CPU:0"):
            arrays, rows, batch = kp.array_parts(adapter)
        order_seed = seed() if shuffle and seed else None
        parts_from = _parts_of_arrays(arrays, rows, batch, order_seed, within_batches)
        return GlobalBatches(
            parts_from(0),
            adapter.num_batches,
            adapter.batch_size,
            True,
            adapter.on_epoch_begin,
            adapter.on_epoch_end,
            parts_from,
            spec=_spec_of_arrays(arrays),
            arrays=arrays,
        )
    dataset = adapter.get_tf_dataset()
    _check_has_input(dataset.element_spec)
    _check_batched(dataset.element_spec)
    if shuffle and seed and isinstance(x, keras.utils.PyDataset) and x.num_batches is not None:
        return _in_an_order(x, dataset.element_spec, class_weight, seed())
    return GlobalBatches(
        parts_of_dataset(dataset),
        adapter.num_batches,
        None,
        is_dataset and bool(dataset.cardinality() == tf.data.INFINITE_CARDINALITY),
        adapter.on_epoch_begin,
        adapter.on_epoch_end,
        dataset=dataset,
    )


def _in_an_order(
    source: keras.utils.PyDataset, spec: Any, class_weight: dict[int, float] | None, seed: int
) -> GlobalBatches:
    dataset = OrderedBatches(source, seed, class_weight).dataset(spec)
    return GlobalBatches(
        parts_of_dataset(dataset),
        source.num_batches,
        None,
        False,
        source.on_epoch_begin,
        source.on_epoch_end,
        dataset=dataset,
    )


def _parts_of_arrays(
    arrays: Any, rows: int, batch: int, seed: int | None, within_batches: bool
) -> Callable[[int], PartsOf]:
    """The number of the first global batch -> the parts from there on."""
    steps = max(1, -(-rows // batch))
    # Where there are no rows or steps, or fewer than none, the epochs say so.
    order = Order(max(rows, 1), max(1, min(batch, rows)), None if within_batches else seed)

    def parts_of(start: int, first: int, local: int, replicas: int) -> tf.data.Dataset:
        @tf.autograph.experimental.do_not_convert
        def parts(step: tf.Tensor) -> Any:
            size = tf.minimum(rows - (step % steps) * batch, batch)
            spans = _spans(size, first, local, replicas)
            begin, end = spans[0][1], spans[-1][2]  # spans follow each other: rows are asked once
            if seed is not None and within_batches:
                of_batch = tf.stack([tf.constant(seed, tf.int64), step])
                mixed = sorted_at_random(size, of_batch)[begin:end]
                indices = (step % steps) * batch + mixed
            else:
                key = None if order.seed is None else order.key_in_graph(step // steps)
                indices = order.rows(step % steps, begin, end, key=key)

            return tuple(
                (mine, size, kp.take(arrays, indices[low - begin : high - begin]))
                for mine, low, high in spans
            )

        return without_autotune(
            tf.data.Dataset.range(start, 2**62).map(
                parts, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True
            )
        )

    return lambda begin: functools.partial(parts_of, begin)


def _spec_of_arrays(arrays: Any) -> Any:
    """What a batch of them is; None where that takes a pipeline to know."""
    if not all(isinstance(part, tf.Tensor) for part in keras.tree.flatten(arrays)):
        return None
    return keras.tree.map_structure(
        lambda part: tf.TensorSpec([None, *part.shape[1:]], part.dtype), arrays
    )


def parts_of_dataset(dataset: tf.data.Dataset) -> PartsOf:
    """The parts of a data set of global batches."""

    def parts_of(first: int, local: int, replicas: int) -> tf.data.Dataset:
        @tf.autograph.experimental.do_not_convert
        def parts(*batch: Any) -> Any:
            whole = _plain(batch if len(batch) > 1 else batch[0])
            size = _batch_size(whole)
            if replicas == 1:
                return ((size, size, whole),)
            return tuple(
                (mine, size, _rows_of(whole, low, high))
                for mine, low, high in _spans(size, first, local, replicas)
            )

        return dataset.map(parts, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)

    return parts_of


def _plain(batch: Any) -> Any:
    """Keras's generators put an empty Optional where a part of the batch is None."""
    return keras.tree.map_structure(
        lambda part: None if isinstance(part, tf.experimental.Optional) else part, batch
    )


def _spans(rows: Any, first: int, local: int, replicas: int) -> list[tuple[Any, Any, Any]]:
    """Of each local replica: rows of its part, first row, row after the last one to read.

    A part of 0 rows, of a batch with fewer rows than there are replicas, reads one row all the
    same: many operations fail, or yield NaN, on no rows.
    """
    low, high = bounds(rows, tf.range(first, first + local, dtype=tf.int64), replicas)
    spans = high - low, low, tf.maximum(high, low + 1)
    return list(zip(*(tf.unstack(each, local) for each in spans), strict=True))


def _rows_of(batch: Any, low: Any, high: Any) -> Any:
    def cut(part: Any) -> Any:
        return None if part is None else rows_between(part, low, high)

    return keras.tree.map_structure(cut, batch)


def _batch_size(batch: Any) -> tf.Tensor:
    return rows_in(next(part for part in keras.tree.flatten(batch) if part is not None))


def _check_has_input(spec: Any) -> None:
    x, _, _ = keras.utils.unpack_x_y_sample_weight(spec)
    if all(getattr(part, "shape", None) is None for part in keras.tree.flatten(x)):
        raise TrainingError(
            "each batch must begin with the model's input, got None: let the data yield x, (x, y)"
            " or (x, y, sample_weight)."
        )


def _check_batched(spec: Any) -> None:
    shapes = [getattr(part, "shape", None) for part in keras.tree.flatten(spec)]
    known = [shape for shape in shapes if shape is not None and shape.rank is not None]
    single = any(shape.rank == 0 for shape in known)
    rows = {shape[0] for shape in known if shape.rank and shape[0] is not None}
    if single or len(rows) > 1:
        found = "single values" if single else f"parts of {sorted(rows)} rows"
        raise TrainingError(
            f"the dataset yields {found}, not batches: its element_spec is {spec}."
            " Call .batch(n) on it, n being the examples of a global batch."
        )
