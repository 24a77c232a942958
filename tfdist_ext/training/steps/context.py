"""The context of a replica's step: its part of the global batch, and sums over all replicas.

A replica's step computes on its part what one device would compute on the whole batch. The result
counts with the fraction of the global batch's rows that the part has. `tfd.all_rows` gives the rows
of all parts.

Between workers, a value whose size may differ from step to step is padded; see
`strategies/reductions.py`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import keras
import tensorflow as tf

from tfdist_ext.data.pipelines import Structure
from tfdist_ext.data.shards import bounds
from tfdist_ext.errors import TrainingError
from tfdist_ext.strategies.owned_sums import sums_of
from tfdist_ext.strategies.reductions import (
    OTHER,
    STATISTIC,
    Kind,
    Reduced,
    key_of_size,
    padded_to_size,
)
from tfdist_ext.strategies.traced_replica import replica_number, sum_up
from tfdist_ext.training._keras_private import (
    INSTANCE_KEY,
    Original,
    raw_value,
    replaces,
    substitutes,
)
from tfdist_ext.training.steps.rows import (
    SAME_ORDER,
    EqualTensors,
    Gradient,
    Key,
    Rows,
    behind,
    rows_of,
    with_unknown_rows,
)
from tfdist_ext.training.steps.step_timer import Waits
from tfdist_ext.user_frames import filter_traceback

_Values = TypeVar("_Values")
_Result = TypeVar("_Result")

# Which output of an operation has distinct numbers. Keras and TensorFlow look up sparse ids by it.
_OF_DISTINCT = {
    **dict.fromkeys(("Unique", "UniqueV2"), 0),
    **{f"SparseSegment{combiner}GradV2": 1 for combiner in ("Mean", "Sum", "SqrtN")},
}

_INDICES = 1 << 32  # more than a table has rows


class Lookups:
    """A gradient as parts that are summed over replicas: one for each lookup of a table.

    Optimizers with second moments square the slices of a gradient one by one. Slices of the batch's
    rows stay apart, as on one device. A lookup by the same indices on all replicas, such as
    positions, or by distinct ids, has one slice for each index on one device. The key of such a
    slice is its place in the lookup and its index.

    Attributes:
        parts: the gradient itself, or slices of each lookup.
        has_keys: for each part, whether its indices are keys. One device has one slice for a key.
    """

    def __init__(self, gradient: Gradient, equal: EqualTensors):
        self.parts: list[Gradient] = [gradient]
        self.has_keys = [False]
        if not isinstance(gradient, tf.IndexedSlices):
            return
        lookups = _concatenated(gradient.indices)
        kinds = [_kind_of(lookup, equal) for lookup in lookups]
        if set(kinds) == {"rows"}:
            return
        sizes = tf.stack([tf.size(lookup) for lookup in lookups])
        values = tf.split(gradient.values, sizes, num=len(lookups))
        indices = tf.split(gradient.indices, sizes, num=len(lookups))
        self.has_keys = [kind != "rows" for kind in kinds]
        self.parts = []
        for kind, value, index in zip(kinds, values, indices, strict=True):
            keys, shape = index, gradient.dense_shape
            if kind != "rows":
                place = tf.range(tf.size(index, tf.int64)) if kind == "equal" else 0
                keys, shape = place * _INDICES + tf.cast(index, tf.int64), None
            self.parts.append(tf.IndexedSlices(value, keys, shape))
        self._indices, self._shape = gradient.indices.dtype, gradient.dense_shape

    def joined(self, sums: Sequence[Gradient]) -> Gradient:
        """Returns the gradient, from the sums of its parts, with the slices of one device."""
        if not any(self.has_keys):
            return sums[0]
        slices = [
            self._merged(total) if has_keys else total
            for total, has_keys in zip(sums, self.has_keys, strict=True)
        ]
        if any(not isinstance(part, tf.IndexedSlices) for part in slices):
            return tf.add_n(list(map(tf.convert_to_tensor, slices)))  # by a StrategyTemplate
        values = tf.concat([part.values for part in slices], 0)
        return tf.IndexedSlices(values, tf.concat([x.indices for x in slices], 0), self._shape)

    def _merged(self, slices: tf.IndexedSlices) -> tf.IndexedSlices:
        keys, places = tf.unique(slices.indices)
        values = tf.math.unsorted_segment_sum(slices.values, places, tf.size(keys))
        return tf.IndexedSlices(values, tf.cast(keys % _INDICES, self._indices), self._shape)


def _concatenated(indices: tf.Tensor) -> list[tf.Tensor]:
    made_by = behind(indices, SAME_ORDER).op
    if made_by.type != "ConcatV2" or tf.get_static_value(made_by.inputs[-1]) != 0:
        return [indices]
    return [part for tensor in made_by.inputs[:-1] for part in _concatenated(tensor)]


def _kind_of(indices: tf.Tensor, equal: EqualTensors) -> Literal["equal", "distinct", "rows"]:
    if equal.has(indices):
        return "equal"
    source = behind(indices, SAME_ORDER)
    return "distinct" if _OF_DISTINCT.get(source.op.type) == source.value_index else "rows"


class ReplicaSums:
    """Sums over all replicas, at which the step of a replica waits for the other replicas.

    Args:
        replicas: number of parts of the global batch, over all workers.
        between_workers: TensorFlow's collectives sum over workers.
        waits: records when the replica waits for others; None if nobody asks for times.

    Attributes:
        equal: knows which tensors are equal on all replicas, as sums are.
        graph: the graph of the step; None in eager code.
    """

    def __init__(self, replicas: int, *, between_workers: bool = False, waits: Waits | None = None):
        self.replicas = replicas
        self.equal = EqualTensors()
        self.graph = current_graph()
        self._between_workers = between_workers
        self._waits = waits

    def check_graph(self) -> None:
        """Raise TrainingError in a graph inside the step's graph, where replicas cannot wait."""
        if current_graph() is not self.graph:
            raise TrainingError(
                "A sum over replicas is inside a tf.function, a cond or a loop within the step. It"
                " comes from an optimizer's apply, a masked loss, a synchronized BatchNormalization"
                " or tfd.all_rows. Call it in the body of train_step or call, which is compiled as"
                " a whole."
            )

    def synchronize(self, function: Callable[[_Values], _Result], values: _Values) -> _Result:
        """Returns `function(values)`, in which this replica waits for the others."""
        return (
            function(values) if self._waits is None else self._waits.synchronize(function, values)
        )

    def all_reduce(
        self, values: Sequence[Gradient], what: Sequence[Reduced] | None = None
    ) -> list[Gradient]:
        """Returns the sum of each value over all replicas. It has no gradient.

        Args:
            what: what each value is, for a StrategyTemplate. The default is statistics.
        """
        if not values or self.replicas == 1:
            return list(values)
        self.check_graph()
        what = [STATISTIC] * len(values) if what is None else what
        for value, reduced in zip(values, what, strict=True):
            # TensorFlow loses the shape of a dense gradient where rows are summed. Tensors of known
            # shapes are summed together, in one collective.
            if reduced.kind == "gradient" and not isinstance(value, tf.IndexedSlices):
                shape = None if reduced.variable is None else reduced.variable.shape
                value.set_shape(shape if value.shape.is_compatible_with(shape) else None)
        lookups = [Lookups(value, self.equal) for value in values]
        parts = [part for lookup in lookups for part in lookup.parts]
        of_parts = [
            OTHER if has_keys else kind
            for lookup, kind in zip(lookups, what, strict=True)
            for has_keys in lookup.has_keys
        ]
        sums = iter(self.synchronize(lambda local: self._sums(local, of_parts), parts))
        summed = [lookup.joined([next(sums) for _ in lookup.parts]) for lookup in lookups]
        self.equal.add(summed)
        return summed

    def before_and_all(self, counts: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the sums of a vector (int64) over the replicas before this one, and over all."""
        number = tf.range(self.replicas)[:, tf.newaxis]
        here = tf.where(number == replica_number(), counts, 0)
        (of_all,) = self.all_reduce([here], [OTHER])
        before = tf.where(number < replica_number(), of_all, 0)
        return tf.reduce_sum(before, 0), tf.reduce_sum(of_all, 0)

    def _sums(self, values: Sequence[Gradient], what: Sequence[Reduced]) -> list[Gradient]:
        groups: dict[tuple[Any, ...], list[int]] = {}
        for number, value in enumerate(values):
            groups.setdefault(self._group(value), []).append(number)
        summed: list[Gradient] = [None] * len(values)
        for (sum_of, *_), numbers in groups.items():
            totals = sum_of([values[i] for i in numbers], [what[i] for i in numbers])
            for number, total in zip(numbers, totals, strict=True):
                summed[number] = total
        return summed

    def _group(self, value: Gradient) -> tuple[Any, ...]:
        """Returns the function that sums a value, and what is alike in its arguments."""
        is_sparse = isinstance(value, tf.IndexedSlices)
        has_known_shape = is_sparse or value.shape.is_fully_defined()
        if self._between_workers and self.graph is not None:
            if is_sparse:
                return self._sum_of_slices, value.dtype.name
            if not has_known_shape:
                return self._sum_of_elements, value.dtype.name
        return sum_up, value.dtype.name, is_sparse, has_known_shape

    def _sum_of_elements(
        self, values: Sequence[tf.Tensor], what: Sequence[Reduced]
    ) -> list[tf.Tensor]:
        """Sums dense tensors of one dtype whose shapes are unknown until the step runs."""
        sizes = [tf.size(value) for value in values]
        flat = tf.concat([tf.reshape(value, [-1]) for value in values], 0)
        (total,) = sum_up([padded_to_size(flat)], what[:1], self.keys_of_size)
        pieces = tf.split(total[: tf.size(flat)], tf.stack(sizes), num=len(values))
        return [
            tf.ensure_shape(tf.reshape(piece, tf.shape(value)), value.shape)
            for piece, value in zip(pieces, values, strict=True)
        ]

    def _sum_of_slices(
        self, values: Sequence[tf.IndexedSlices], what: Sequence[Reduced]
    ) -> list[tf.IndexedSlices]:
        """Gathers the slices of all replicas, for all tables of one dtype in one collective.

        With `gradient_dtype` the rows travel in this type. Indices travel as digits beside them.
        """
        counts = tf.stack([tf.size(value.indices, tf.int64) for value in values])
        before, count = (tf.unstack(vector, len(values)) for vector in self.before_and_all(counts))
        narrow = sums_of(tf.distribute.get_strategy()).narrow
        dtype = values[0].dtype if narrow is None else narrow.travels_as(values[0].dtype)
        bits = 24 if dtype.size > 2 else 8  # of a digit, which this type holds exactly
        powers = [  # the weights of the digits of integers of this type
            tf.constant([1 << n for n in range(0, 8 * value.indices.dtype.size, bits)], tf.int64)
            for value in values
        ]
        parts = [tf.cast(value.values, dtype) for value in values]
        for value, weights in zip(values, powers, strict=True):
            indices = tf.cast(value.indices, tf.int64)[:, tf.newaxis]
            parts.append(tf.cast(indices // weights % (1 << bits), dtype))
        padded = list(map(among_zeros, parts, [*before, *before], [*count, *count]))
        sums = self._sum_of_elements(padded, what)
        slices = []
        for number, (value, weights) in enumerate(zip(values, powers, strict=True)):
            digits = tf.cast(sums[len(values) + number], tf.int64)
            indices = tf.cast(tf.reduce_sum(digits * weights, 1), value.indices.dtype)
            rows = tf.cast(sums[number], value.dtype)
            slices.append(tf.IndexedSlices(rows, indices, value.dense_shape))
        return slices

    @contextlib.contextmanager
    def keys_of_size(self, size: tf.Tensor) -> Iterator[None]:
        """Scope in which collectives have the keys of a size."""

        called: set[Any] = set()
        key = functools.partial(collective_key.function, size)
        with substitutes({collective_key: key}, called):
            yield
        if not called:
            raise collective_key.not_called()


@replaces(INSTANCE_KEY)
def collective_key(size: tf.Tensor, original: Original, launcher: object) -> tf.Tensor:
    """Returns one key per size; TensorFlow uses one key for all iterations of a loop."""
    return key_of_size(original(launcher), size)


@dataclass(eq=False)
class StepContext:
    """The rows of the running replica, as a part of the global batch.

    Args:
        rows: number of rows of this part, a scalar tensor. A part of 0 rows has read a row of
            another replica, and counts for nothing.
        global_rows: number of rows of the global batch, over all replicas of all workers.
        sums: sums over all replicas.
        local_replicas: number of parts on this worker.
        batch: the argument of the replica's step, a structure of tensors.
        cut_evenly: the parts are as `shards.bounds` cuts the global batch.
        batch_size: rows of a complete global batch; None if not known.
        sums_in_apply: gradients are summed where an optimizer gets them, not where a tape computes
            them. The step must not change them between the two.
        lazy_updates: as `distribute` takes it.

    Attributes:
        rows_read: rows that the part's tensors have: one row where the part has none of its own.
        replicas, equal, graph: those of `sums`.
        on_tpu: whether the replica runs on a TPU, where copies of variables cannot be reached one
            by one.
        substitutes: what the step calls in place of functions of Keras and TensorFlow.
        called: the replacements that the step has called.
        inputs_of_exact: maps the key of a tensor that covers all rows to the tensors before it.
        statistics: maps the key of a tensor to whether it is a statistic of this part's rows.
        checked: the keys of tensors that were checked not to mix rows.
        row_numbers: shuffled numbers of rows in the global batch.
    """

    rows: tf.Tensor
    global_rows: tf.Tensor
    sums: ReplicaSums
    local_replicas: int
    batch: Structure
    cut_evenly: bool = True
    batch_size: int | None = None
    sums_in_apply: bool = False
    lazy_updates: bool = False

    def __post_init__(self) -> None:
        self._batch_fraction = tf.cast(self.rows, tf.float64) / tf.cast(
            self.global_rows, tf.float64
        )
        self.rows = tf.cast(self.rows, tf.int64)
        self.rows_read = tf.maximum(self.rows, 1)
        self.replicas, self.graph = self.sums.replicas, self.sums.graph
        self.on_tpu = isinstance(tf.distribute.get_strategy(), tf.distribute.TPUStrategy)
        if self.replicas > 1 and self.graph is not None and not self.on_tpu:
            self.batch = with_unknown_rows(self.batch)
        self.equal = self.sums.equal
        self.equal.add(self.batch, equal=False)
        self.equal.add(self.global_rows)
        self.substitutes: Mapping[Any, Callable[..., Any]] = {}
        self.called: set[Any] = set()
        self.inputs_of_exact: dict[Key, Sequence[tf.Tensor]] = {}
        self.statistics: dict[Key, bool] = {}
        self.checked: set[Key] = set()
        self.row_numbers: list[tf.Tensor] = []
        self._position: tuple[tf.Tensor, tf.Tensor] | None = None

    def batch_fraction(self, dtype: tf.DType | str) -> tf.Tensor:
        """Returns the rows of this part divided by the rows of the global batch."""
        return tf.cast(self._batch_fraction, dtype)

    def where_nonempty(self, value: tf.Tensor, otherwise: tf.Tensor | float = 0) -> tf.Tensor:
        """Returns `value`, or `otherwise` where this replica has no row of its own."""
        return tf.where(self.rows > 0, value, otherwise)

    def position(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns (rows of the parts before this one, rows of all parts)."""
        if self._position is None:
            with outside_of_inner_graphs(self.graph):
                if self.cut_evenly:
                    rows = tf.cast(self.global_rows, tf.int64)
                    number = tf.cast(replica_number(), tf.int64)
                    first, _ = bounds(rows, number, self.replicas)
                    self._position = first, rows
                else:
                    before, rows = self.sums.before_and_all(self.rows[tf.newaxis])
                    self._position = before[0], rows[0]
        return self._position

    def rows_of(self, value: tf.Tensor) -> Rows | None:
        """Returns how a tensor holds the rows of this part, or of all parts; None if it does not.

        In a graph, rows are in a dimension of unknown size. On a TPU, where all sizes are known,
        they are in a first dimension as long as the part.
        """
        if self.replicas == 1 or value.shape.rank == 0:
            return None
        if value.shape.rank is None:  # such as tf.squeeze(x)
            return None if self.equal.has(value) else Rows(0, blocks=0)
        if not self.on_tpu:
            return rows_of(value, self.equal)
        leaves = [leaf for leaf in tf.nest.flatten(self.batch) if leaf is not None]
        return Rows(0) if value.shape[0] == leaves[0].shape[0] else None

    def rows_in(self, value: tf.Tensor) -> Literal["part", "batch"] | None:
        """Returns whether a floating tensor has rows of this part, or of all parts, or none."""
        if not tf.is_tensor(value) or not (value.dtype.is_floating or value.dtype.is_complex):
            return None
        if value.shape.rank and self.equal.has(value):
            return "batch" if None in value.shape.as_list() else None
        return None if self.rows_of(value) is None else "part"

    def weighted(self, value: Gradient) -> Gradient:
        """Returns a floating or complex value times `batch_fraction`, any other one unchanged.

        A part of 0 rows gives 0, never NaN.
        """
        if isinstance(value, tf.IndexedSlices):
            return tf.IndexedSlices(self.weighted(value.values), value.indices, value.dense_shape)
        value = tf.convert_to_tensor(value)
        if self.replicas == 1 or not (value.dtype.is_floating or value.dtype.is_complex):
            return value
        return tf.math.multiply_no_nan(value, self.batch_fraction(value.dtype))

    def sum_over_rows(self, total: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
        """Returns a sum of `values`, divided by `batch_fraction` if they have rows of this part.

        The mean over parts is then the sum over all rows.
        """
        if self.rows_in(values) != "part":
            return total
        return tf.math.divide_no_nan(total, self.batch_fraction(total.dtype))

    def mean(
        self, values: Sequence[tf.Tensor], variables: Sequence[keras.Variable | tf.Variable]
    ) -> list[tf.Tensor]:
        """Returns the mean over all rows of each floating value that is a mean over the part's.

        Other values (seeds, counters) are equal on all replicas.

        Args:
            variables: those that the values are written to.
        """
        floats = [i for i, value in enumerate(values) if value.dtype.is_floating]
        what = [reduced_for("statistic", variables[i]) for i in floats]
        means = self.sums.all_reduce([self.weighted(values[i]) for i in floats], what)
        by_index = dict(zip(floats, means, strict=True))
        return [by_index.get(i, value) for i, value in enumerate(values)]

    def differentiable_sum(
        self, values: Sequence[tf.Tensor], what: Reduced = STATISTIC
    ) -> list[tf.Tensor]:
        """Returns the sum of each tensor over all replicas, for use inside a model.

        Its gradient is that of the loss of the global batch, in which the loss of this replica has
        the weight `batch_fraction`. The division by `batch_fraction` cancels the multiplication by
        it before gradients are summed.
        """

        def over_replicas(parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
            return self.sums.all_reduce(parts, [what] * len(parts))

        @tf.custom_gradient
        def summed(*parts: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., list[tf.Tensor]]]:
            def gradient(*upstream: tf.Tensor) -> list[tf.Tensor]:
                upstream = tuple(map(tf.convert_to_tensor, upstream))
                return [
                    tf.math.divide_no_nan(value, self.batch_fraction(value.dtype))
                    for value in over_replicas(list(map(self.weighted, upstream)))
                ]

            return over_replicas([tf.identity(value) for value in parts]), gradient

        totals = list(summed(*values))
        self.equal.add(totals)
        return totals


def among_zeros(value: tf.Tensor, before: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
    """Pads a tensor with rows of zeros to `count` rows, of which `before` come first."""
    after = count - before - tf.shape(value, tf.int64)[0]
    return tf.pad(value, [[before, after], *[[0, 0]] * (value.shape.rank - 1)])


# Of this thread: TensorFlow runs each replica in a thread of its own.
_running: ContextVar[StepContext | None] = ContextVar("running", default=None)


def current_step() -> StepContext | None:
    """Returns the context of the running replica, None outside of a step."""
    return _running.get()


@contextlib.contextmanager
def running_step(context: StepContext | None) -> Iterator[None]:
    """Scope of a replica's step; with None, a scope without a step."""
    token = _running.set(context)
    functions, called = (context.substitutes, context.called) if context else (None, None)
    try:
        with substitutes(functions, called):
            yield
    finally:
        _running.reset(token)


@filter_traceback
def all_rows(x: Any) -> Any:
    """Returns the rows of all replicas, in the order of the global batch.

    Use it for losses and layers that compare rows: losses with in-batch negatives (SimCLR, CLIP,
    retrieval), statistics of the batch (Barlow Twins), and queues of features (MoCo, NNCLR). Call
    it in `call`, `train_step`, `test_step`, a loss or a metric, on every replica.

        z = tfd.all_rows(self.projector(x))      # (rows of the global batch, width)
        loss = contrastive_loss(z)               # the same number on each replica
        self.queue.assign(tf.concat([z, self.queue[: -tf.shape(z)[0]]], axis=0))

    The function is differentiable. The gradient equals the gradient of one device, whether each
    replica computes the loss of all rows, or the mean loss of its own rows against all rows.

    Args:
        x: a tensor of numbers or booleans, or a structure of tensors (tuples, lists, dicts, None).
            Axis 0 has one entry for each row of this replica. Call the function before you drop,
            repeat or merge rows.

    Returns:
        The same structure, with the rows of the global batch on axis 0. Outside of a step, with one
        replica, and under ParameterServerStrategy, where one worker computes the whole global
        batch, returns `x` unchanged.

    Raises:
        TrainingError: `x` is not a dense tensor of numbers or booleans, or the call is inside a
            `tf.function`, a `tf.cond` or a loop in the step, where replicas cannot wait for each
            other.
        tf.errors.InvalidArgumentError: the length of axis 0 is not the number of rows of this
            replica.
    """
    context = current_step()
    if context is None or context.replicas == 1:
        return x
    values = tf.nest.flatten(x)
    rows = iter(gather_rows(context, [value for value in values if value is not None]))
    return tf.nest.pack_sequence_as(x, [None if value is None else next(rows) for value in values])


def gather_rows(context: StepContext, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns the rows of all replicas for each dense tensor; differentiable.

    Each replica puts its rows in their places among zeros, and the results are summed. This works
    for parts of any size, on each strategy, and for each gradient.
    """
    context.sums.check_graph()
    tensors = [_dense(value) for value in values]
    before, count = context.position()
    padded = []
    for tensor in tensors:
        rows = context.rows_of(tensor)
        if rows is not None and (rows.axis or rows.blocks > 1):
            raise TrainingError(_NOT_THE_ROWS)
        check = tf.debugging.assert_equal(
            tf.shape(tensor, tf.int64)[0], context.rows_read, message=_NOT_THE_ROWS
        )
        with tf.control_dependencies([] if check is None else [check]):
            # Collectives sum few types of integers.
            dtype = tensor.dtype if tensor.dtype.is_floating else tf.int64
            own = tf.cast(tensor, dtype)[: context.rows]
        padded.append(among_zeros(own, before, count))
    floats = [value for value in padded if value.dtype.is_floating]
    integers = [value for value in padded if not value.dtype.is_floating]  # without a gradient
    float_sums = iter(context.differentiable_sum(floats, OTHER) if floats else ())
    other_sums = iter(context.sums.all_reduce(integers, [OTHER] * len(integers)))
    gathered = []
    for tensor in tensors:
        total = next(float_sums if tensor.dtype.is_floating else other_sums)
        gathered.append(rows := tf.cast(total, tensor.dtype))
        rows.set_shape([None, *tensor.shape[1:]])
    return gathered


_NOT_THE_ROWS = (
    "tfd.all_rows(x): axis 0 of x must hold the rows of this replica's part of the batch, one entry"
    " for each row. Call tfd.all_rows before rows are dropped, repeated or concatenated:"
    " tf.concat([tfd.all_rows(a), tfd.all_rows(b)], axis=0)."
)


def _dense(value: Any) -> tf.Tensor:
    """A tensor that `all_rows` takes, or TrainingError."""
    what = type(value).__name__
    if not isinstance(value, tf.RaggedTensor | tf.SparseTensor | tf.IndexedSlices):
        value = tf.convert_to_tensor(value)
        if value.shape.rank and (
            value.dtype.is_floating or value.dtype.is_integer or value.dtype.is_bool
        ):
            return value
        what = f"a tensor of shape {value.shape} and {value.dtype.name}"
    raise TrainingError(
        "tfd.all_rows needs dense tensors of numbers or booleans, whose axis 0 is the batch, got"
        f" {what}. Convert it with RaggedTensor.to_tensor or tf.sparse.to_dense."
    )


def reduced_for(kind: Kind, variable: keras.Variable | tf.Variable) -> Reduced:
    """Returns what a value of this kind for a variable is."""
    path = getattr(variable, "path", "")
    raw = raw_value(variable) if isinstance(variable, keras.Variable) else variable
    return Reduced(kind=kind, variable=raw, path=path or raw.name.removesuffix(":0"))


def current_graph() -> tf.Graph | None:
    """Returns the graph that is being built, None in eager code."""
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def outside_of_inner_graphs(graph: tf.Graph | None) -> contextlib.AbstractContextManager[Any]:
    """Scope in which operations go to the given outer graph, or run at once where it is None."""
    if current_graph() is graph:
        return contextlib.nullcontext()
    return tf.init_scope() if graph is None else graph.as_default()
