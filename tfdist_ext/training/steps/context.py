"""Which part of a global batch the running replica holds.

A replica's step computes on its part what one device would compute on the whole batch. The
fraction of the batch that the part is, its rows over those of the global batch, says how much the
result counts. `tfd.all_rows` gives the rows of all parts.
"""

from __future__ import annotations

import contextlib
import numbers
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, TypeVar

import keras
import tensorflow as tf

from tfdist_ext.data.shards import bounds
from tfdist_ext.errors import TrainingError
from tfdist_ext.strategies.collective_sizes import (
    Padding,
    from_vectors,
    in_one_vector,
    key_of_size,
    padded,
)
from tfdist_ext.strategies.reductions import OTHER, STATISTIC, Kind, Reduced
from tfdist_ext.strategies.traced_replica import replica_number, sum_up
from tfdist_ext.training import _keras_private as kp
from tfdist_ext.training._tf_private import gathered_values, is_recording
from tfdist_ext.training.protocols import Structure
from tfdist_ext.training.steps.replaced import not_called, substitutes
from tfdist_ext.training.steps.rows import (
    EqualTensors,
    Gradient,
    Lookup,
    blocks_of_rows,
    first_size,
    has_rows_of,
    joined,
    lookups_of,
    merged,
    places_rows,
    with_unknown_rows,
)
from tfdist_ext.training.steps.step_timer import ReplicaTimer
from tfdist_ext.user_frames import filter_traceback

__all__ = [
    "StepContext",
    "all_rows",
    "current_graph",
    "current_step",
    "outside_of_inner_graphs",
    "reduced_for",
    "running_step",
]


_Values = TypeVar("_Values")
_Answer = TypeVar("_Answer")


_here = threading.local()  # TensorFlow runs each replica in a thread of its own


@dataclass(eq=False)
class StepContext:
    """The rows that the running replica holds, as a part of the global batch.

    Args:
        rows: examples of this part, a scalar tensor. A part of 0 rows has read another's row, and
            counts for nothing.
        of: examples of the global batch, over all replicas of all workers.
        replicas: parts of the global batch, over all workers.
        local_replicas: parts on this worker.
        batch: what the replica's step gets, a structure of tensors.
        keras_step: it is Keras's own, which gives its gradients to an optimizer as they are.
        between_workers: TensorFlow's collectives sum over workers.
        timer: of a step whose time is wanted.
        cut_evenly: the parts are as `shards.bounds` cuts the global batch.
        batch_size: rows of a whole global batch; None where it is not known.
        weight_shapes: of the model's variables.

    Attributes:
        asked_batch_size: whether what was traced depends on it.
        rows_read: rows that the part's tensors have: one where it has none of its own.
        substitutes: what stands in for Keras's functions while this is the running part, by key.
        called: the keys of those that were called.
        gradients_are_weighted: those that Keras's own step has now are, with the share, and are not
            summed yet.
        computes_gradients: a tape does, now.
        synchronized_moments: how many statistics were taken over all replicas.
    """

    rows: tf.Tensor
    of: tf.Tensor
    replicas: int
    local_replicas: int
    batch: Structure
    keras_step: bool = False
    between_workers: bool = False
    timer: ReplicaTimer | None = None
    cut_evenly: bool = True
    batch_size: int | None = None
    weight_shapes: Set[tuple[int | None, ...]] = frozenset()

    def __post_init__(self) -> None:
        self.substitutes: Mapping[str, Callable[..., Any]] = {}
        self.called: set[str] = set()
        self.gradients_are_weighted = False
        self.computes_gradients = False
        self.synchronized_moments = 0
        self._batch_fraction = tf.cast(self.rows, tf.float64) / tf.cast(self.of, tf.float64)
        self.rows = tf.cast(self.rows, tf.int64)
        self.rows_read = tf.maximum(self.rows, 1)
        self._graph = current_graph()
        if self.replicas > 1 and self._graph is not None and not _on_tpu():
            self.batch = with_unknown_rows(self.batch)
        self._size = next(x for x in tf.nest.flatten(self.batch) if x is not None).shape[0]
        self._has_gathered = False  # by all_rows
        self._place: tuple[tf.Tensor, tf.Tensor] | None = None
        self.asked_batch_size = False
        self._row_numbers: list[tf.Tensor] = []
        self._is_batch: tf.Tensor | None = None  # of a shape with a number, while it is drawn
        self._equal = EqualTensors(self.batch)
        self._equal.add(self.of)
        # Id of a sum -> the sum, this part's own share in it.
        self._own_gradients: dict[int, tuple[Gradient, Gradient]] = {}

    def batch_fraction(self, dtype: tf.DType | str) -> tf.Tensor:
        """Rows over the rows of the global batch."""
        return tf.cast(self._batch_fraction, dtype)

    def is_nonempty(self, dtype: tf.DType | str) -> tf.Tensor:
        """1, or 0 where this replica has no row of its own."""
        return tf.cast(self.rows > 0, dtype)

    def where_nonempty(self, value: tf.Tensor, otherwise: tf.Tensor | float) -> tf.Tensor:
        """`value`, or `otherwise` where this replica has no row of its own."""
        return tf.where(self.rows > 0, value, otherwise)

    def has_rows(self, value: tf.Tensor) -> bool:
        """Whether a floating tensor has numbers for each row of the part.

        In a graph, rows are in a dimension of unknown size. In an eager step, they are in a first
        dimension as long as the part.
        """
        sizes = _sizes(value)
        if self.has_all_rows(value):
            return False
        if None in sizes or self._size is None:
            return None in sizes
        return sizes[:1] == [self._size]

    def has_all_rows(self, value: tf.Tensor) -> bool:
        """Whether a tensor has numbers for each row of the global batch, from `all_rows`."""
        sizes = _sizes(value)
        if not self._has_gathered or not sizes:
            return False
        if tf.is_symbolic_tensor(value):
            return None in sizes and self._equal.has(value)
        of_all, of_part = int(self.place()[1]), int(self.rows_read)
        return of_all > of_part and sizes[0] is not None and sizes[0] % of_all == 0

    def check_written(
        self, variable: keras.Variable | tf.Variable, value: Any, *, is_metric: bool = False
    ) -> None:
        """Raise TrainingError if rows of this part are written into a variable's rows.

        A metric may add them to its rows, because it is summed over replicas.
        """
        if self.replicas == 1 or self._graph is None or _on_tpu():
            return
        if not tf.is_symbolic_tensor(value):
            return
        if (how := places_rows(value, self._equal, is_metric=is_metric)) is not None:
            raise self._rows_written(variable, how)

    def check_places(self, variable: tf.Variable, places: Any, how: str) -> None:
        """Raise TrainingError if the places that are written follow from this part's rows."""
        if tf.is_symbolic_tensor(places) and not self._equal.has(places):
            raise self._rows_written(variable, how)

    def _rows_written(self, variable: keras.Variable | tf.Variable, how: str) -> TrainingError:
        return TrainingError(
            f"what is assigned to {getattr(variable, 'path', variable.name)!r} must be the same on"
            f" all {self.replicas} replicas, got rows of this replica's part of the batch (from"
            f" {how}): each replica would write other rows. Use the rows of all replicas:"
            " rows = tfd.all_rows(rows), and so for their indices, before they are put into"
            f" {variable.name!r}."
        )

    def check_equal(self, variable: tf.Variable, values: Any) -> None:
        """Raise TrainingError if a variable that has no mean gets a value of this part's rows."""
        values = [each for each in tf.nest.flatten(values) if tf.is_symbolic_tensor(each)]
        if not variable.dtype.is_floating and not self._equal.has(values):
            raise TrainingError(
                f"What is assigned to the variable {variable.name!r} ({variable.dtype.name}) must"
                f" be the same on all {self.replicas} replicas, but it depends on the rows of this"
                " replica's part of the batch. Compute it from the rows of all replicas, as"
                " tf.shape(tfd.all_rows(x))[0], or count in a keras.metrics.Metric."
            )

    def check_aggregated(self, variable: tf.Variable) -> None:
        """Raise TrainingError where replicas cannot meet to aggregate what they write."""
        if current_graph() is not self._graph:
            raise TrainingError(
                f"The variable {variable.name!r} ({variable.aggregation.name}) is assigned inside a"
                " tf.function, a cond or a loop of the step's own, where replicas cannot combine"
                " their values. Assign it directly in the body of train_step or call, or create it"
                " with self.add_weight(..., trainable=False)."
            )

    def may_have_rows(self, value: tf.Tensor) -> bool:
        """Whether the first dimension of known size may hold several numbers for each row."""
        sizes = _sizes(value)
        if self._size is None or not sizes or self.has_rows(value) or self.has_all_rows(value):
            return False
        return bool(sizes[0]) and sizes[0] % self._size == 0

    def weighted(self, values: Sequence[Gradient]) -> list[Gradient]:
        """Dense values or slices times the share; a part of 0 rows gives 0, never NaN."""
        return list(values) if self.replicas == 1 else list(map(self._times_share, values))

    def contribution(self, value: tf.Tensor) -> tf.Tensor:
        """This replica's part of the mean over all rows; a value that is not a float stays."""
        return self._times_share(value) if value.dtype.is_floating else value

    def mean(
        self, values: dict[int, tf.Tensor], variables: dict[int, keras.Variable]
    ) -> dict[int, tf.Tensor]:
        """The mean over all rows of each floating value that is a mean over the part's.

        Other values (seeds, counters) are the same on every replica already.

        Args:
            variables: by the same keys, the Keras variables that the values are written to.
        """
        floats = [key for key, value in values.items() if value.dtype.is_floating]
        what = [reduced_for("statistic", variables[key]) for key in floats]
        reduced = self.all_reduce(self.weighted([values[key] for key in floats]), what)
        return {**values, **dict(zip(floats, reduced, strict=True))}

    def all_reduce(
        self, values: Sequence[Gradient], what: Sequence[Reduced] | None = None
    ) -> list[Gradient]:
        """The sum of each value over all replicas. It has no gradient.

        Args:
            what: what each value is, for a StrategyTemplate. The default is statistics.
        """
        if not values or self.replicas == 1:
            return list(values)
        self.check_graph()
        what = [STATISTIC] * len(values) if what is None else what
        for value, each in zip(values, what, strict=True):
            _set_shape(value, each)
        lookups = list(map(self.lookups, values))
        of_each = [each for of_one, each in zip(lookups, what, strict=True) for _ in of_one]
        reduced = self._all_reduce([each.value for of_one in lookups for each in of_one], of_each)
        summed = self.merged(lookups, reduced)
        self._equal.add(summed)
        return summed

    def lookups(self, gradient: Gradient) -> list[Lookup]:
        """A gradient, or the slices of each lookup in it; to be summed one by one."""
        return lookups_of(gradient, self._equal)

    def merged(
        self, lookups: Sequence[Sequence[Lookup]], sums: Iterable[Gradient]
    ) -> list[Gradient]:
        """The gradients of which these are the lookups, from the sums over all replicas."""
        rest = iter(sums)
        return [
            joined([merged(each.kind, next(rest), self.replicas) for each in of_one])
            for of_one in lookups
        ]

    def _all_reduce(self, values: Sequence[Gradient], what: Sequence[Reduced]) -> list[Gradient]:
        summed: list[Gradient] = [None] * len(values)
        kinds = list(map(self._kind_of_sum, values))
        for kind in sorted(set(kinds)):
            places = [place for place, other in enumerate(kinds) if other == kind]
            mine = [values[place] for place in places], [what[place] for place in places]
            totals = _SUMS[kind[0]](self, *mine)
            for place, total in zip(places, totals, strict=True):
                summed[place] = total
        return summed

    def _kind_of_sum(self, value: Gradient) -> tuple[str, str]:
        """(how it is summed, what else is alike) of what is summed together.

        "fixed": the size is the same in all steps, or nothing is summed between workers; see
        `collective_sizes` for "slices", and for "elements" of dense tensors.
        """
        slices = isinstance(value, tf.IndexedSlices)
        between_workers = self.between_workers and self._graph is not None
        if slices and between_workers:
            return "slices", value.dtype.name
        known = slices or value.shape.is_fully_defined()
        if between_workers and not known:
            return "elements", value.dtype.name
        return "fixed", "slices" if slices else f"shape {known}"

    def _sum_of_elements(
        self, values: Sequence[tf.Tensor], what: Sequence[Reduced]
    ) -> list[tf.Tensor]:
        """Dense tensors of one dtype; each has one shape on all workers."""
        sizes = [tf.size(value) for value in values]
        flat = tf.concat([tf.reshape(value, [-1]) for value in values], 0)
        (total,) = sum_up([flat], what[:1], Padding(self._keys_of_size))
        pieces = tf.split(total[: tf.size(flat)], tf.stack(sizes), num=len(values))
        return [
            tf.ensure_shape(tf.reshape(piece, tf.shape(value)), value.shape)
            for piece, value in zip(pieces, values, strict=True)
        ]

    def _sum_of_slices(
        self, values: Sequence[tf.IndexedSlices], what: Sequence[Reduced]
    ) -> list[tf.IndexedSlices]:
        """Slices of one dtype: those of all replicas, of all tables in one collective."""
        most = self._most_slices(values)
        alike = [padded(slices, number) for slices, number in zip(values, most, strict=True)]
        padding = Padding(self._keys_of_size, gathers=True)
        (gathered,) = sum_up([in_one_vector(alike)], what[:1], padding)
        return from_vectors(gathered, self.replicas, alike)

    def _most_slices(self, values: Sequence[tf.IndexedSlices]) -> list[tf.Tensor]:
        """The most slices that any replica has of each (int64)."""
        counts = tf.stack([tf.size(value.indices, tf.int64) for value in values])
        return tf.unstack(tf.reduce_max(self._of_replicas(counts), axis=0), len(values))

    @contextlib.contextmanager
    def _keys_of_size(self, size: tf.Tensor) -> Iterator[None]:
        """Scope in which collectives have the keys of one of `collective_sizes.SIZES`."""

        def key(original: Callable[..., int], launcher: object) -> tf.Tensor:
            return key_of_size(original(launcher), size)

        with substitutes({"collective_key": key, "reduce_slices": gathered_values}, self.called):
            yield
        if "collective_key" not in self.called:
            raise not_called("collective_key")

    @contextlib.contextmanager
    def computing_gradients(self, *, weighted: bool) -> Iterator[None]:
        """Scope in which a tape computes gradients; tapes inside of that give a part's own.

        Args:
            weighted: the upstream gradient has the share in it.
        """
        self.computes_gradients, self.gradients_are_weighted = True, weighted
        try:
            yield
        finally:
            self.computes_gradients = False

    def can_sum_gradients(self) -> bool:
        """Whether gradients can be summed when a tape gives them.

        Not in graphs inside the step's, where replicas cannot meet, nor while another tape records,
        which would want the gradient of the sum; then each part's go to the optimizer. On TPUs
        Keras's optimizer sums.
        """
        strategy = tf.distribute.get_strategy()
        in_step = current_graph() is self._graph and not is_recording()
        return in_step and not isinstance(strategy, tf.distribute.TPUStrategy)

    def of_all_rows(self, gradients: Structure, variables: Structure) -> Structure:
        """A structure of this part's gradients as those of the global batch."""
        flat = tf.nest.flatten(gradients)
        weighted = self.weighted([each for each in flat if each is not None])
        pairs = zip(flat, tf.nest.flatten(variables), strict=True)
        what = [reduced_for("gradient", v) for each, v in pairs if each is not None]
        summed = self.synchronize(lambda mine: self.all_reduce(mine, what), weighted)
        for own, gradient in zip(weighted, summed, strict=True):
            self._own_gradients[id(gradient)] = gradient, own
        rest = iter(summed)
        return tf.nest.pack_sequence_as(
            gradients, [None if each is None else next(rest) for each in flat]
        )

    def is_equal(self, gradient: Gradient) -> bool:
        """Whether a gradient is the same on every replica, as of the global batch."""
        return self.replicas > 1 and self._equal.has(gradient)

    def own_gradient(self, gradient: Gradient) -> Gradient:
        """This part's share in a gradient of the global batch."""
        known = self._own_gradients.get(id(gradient))
        return self.weighted([gradient])[0] if known is None else known[1]

    def synchronize(self, meet: Callable[[_Values], _Answer], values: _Values) -> _Answer:
        """`meet(values)`, in which this replica waits for the others; noted for who asks."""
        return meet(values) if self.timer is None else self.timer.synchronize(meet, values)

    def differentiable_all_reduce(
        self, values: Sequence[tf.Tensor], what: Reduced = STATISTIC
    ) -> list[tf.Tensor]:
        """The sum of each tensor over all replicas, to be used inside a model.

        Its gradient is that of the loss of the global batch, in which this replica's loss counts
        with its share; to be weighted by the share once more when gradients are summed, if the
        loss is not weighted already.
        """

        def sum_up(parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
            return self.synchronize(lambda mine: self.all_reduce(mine, [what] * len(mine)), parts)

        @tf.custom_gradient
        def summed(*parts: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., list[tf.Tensor]]]:
            def gradient(*upstream: tf.Tensor) -> list[tf.Tensor]:
                upstream = tuple(tf.convert_to_tensor(value) for value in upstream)
                if self.computes_gradients and self.gradients_are_weighted:
                    # Of a part without rows it may be NaN, and would be so on all replicas.
                    mine = [self.where_nonempty(value, 0) for value in upstream]
                    return sum_up(mine)
                reduced = sum_up(self.weighted(upstream))
                return [
                    tf.math.divide_no_nan(value, self.batch_fraction(value.dtype))
                    for value in reduced
                ]

            return sum_up([tf.identity(value) for value in parts]), gradient

        totals = list(summed(*values))
        self._equal.add(totals)
        return totals

    def all_rows(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The rows of all replicas, for each dense tensor of this part's rows; differentiable.

        Each replica puts its rows where they belong among zeros, and these are summed: parts may
        be of any size, and each strategy and each gradient can do it.
        """
        self.check_graph()
        tensors = [_dense(value) for value in values]
        before, count = self.place()
        padded = []
        for tensor in tensors:
            check = tf.debugging.assert_equal(
                tf.shape(tensor, tf.int64)[0], self.rows_read, message=_NOT_THE_ROWS
            )
            with tf.control_dependencies([] if check is None else [check]):
                mine = tf.cast(tensor, _dtype_of_sums(tensor.dtype))[: self.rows]
            others = [[0, 0]] * (tensor.shape.rank - 1)
            padded.append(tf.pad(mine, [[before, count - before - self.rows], *others]))
        sums = self._totals(padded)
        gathered = []
        for tensor, total in zip(tensors, sums, strict=True):
            rows = tf.cast(total, tensor.dtype)
            rows.set_shape([None, *tensor.shape[1:]])
            gathered.append(rows)
        self._has_gathered = True
        return gathered

    def _totals(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The same of a user's values, some of them integers: these have no gradient."""
        floats = [value for value in values if value.dtype.is_floating]
        others = [value for value in values if not value.dtype.is_floating]
        of_floats = iter(self.differentiable_all_reduce(floats, OTHER) if floats else ())
        of_others = iter(self.all_reduce(others, [OTHER] * len(others)))
        return [next(of_floats if value.dtype.is_floating else of_others) for value in values]

    def place(self) -> tuple[tf.Tensor, tf.Tensor]:
        """(rows of the parts before this one, rows of all parts)."""
        if self._place is None:
            with outside_of_inner_graphs(self._graph):
                number = replica_number()
                if self.cut_evenly:
                    of = tf.cast(self.of, tf.int64)
                    self._place = bounds(of, tf.cast(number, tf.int64), self.replicas)[0], of
                else:
                    self._place = self._counted_place(number)
        return self._place

    def _counted_place(self, number: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        counts, others = self._of_replicas(self.rows[tf.newaxis])[:, 0], tf.range(self.replicas)
        return tf.reduce_sum(tf.where(others < number, counts, 0)), tf.reduce_sum(counts)

    def _of_replicas(self, numbers: tf.Tensor) -> tf.Tensor:
        """The numbers (int64, a vector) of each replica, one below the other."""
        mine = tf.one_hot(replica_number(), self.replicas, dtype=tf.int64)[:, tf.newaxis] * numbers
        return self.synchronize(lambda mine: self.all_reduce(mine, [OTHER]), [mine])[0]

    def blocks_of_rows(self, shape: tf.Tensor, known: tf.TensorShape) -> int:
        """How many tensors of this part's rows, one after another, a shape begins with, or 0.

        Args:
            shape: of what is drawn.
            known: what is known of it while the step is traced.
        """
        if self.replicas == 1 or known.rank == 0:
            return 0
        if tf.is_symbolic_tensor(shape) and (known.rank is None or known[0] is None):
            return 0 if self._equal.has(first_size(shape)) else blocks_of_rows(shape)
        # In an eager step all sizes are numbers. A multiple is several entries of each row.
        if self._size is None or known[0] % self._size or tuple(known) in self.weight_shapes:
            return 0
        return 1 if self._size > 1 or known[0] == 1 else 0

    def has_all_own_rows(self, x: tf.Tensor) -> bool:
        """Whether a tensor has one entry for each row of this part, and no others."""
        return has_rows_of(x, self.batch) if x.shape[0] is None else x.shape[0] == self._size

    def is_batch_size(self, size: tf.Tensor, blocks: int = 1) -> tf.Tensor:
        """Whether a first dimension has this part's rows, when the step runs."""
        if self._is_batch is not None:
            return self._is_batch
        return size % (blocks * self.rows_read) == 0

    @contextlib.contextmanager
    def shape_of_part(self, shape: Any) -> Iterator[Any]:
        """Scope in which a shape with the rows of the global batch as a number has the part's."""
        if not self._may_be_batch(shape):
            yield shape
            return
        first, *rest = shape
        is_batch = tf.cast(self.of, tf.int64) == first
        mine = tf.cast(tf.where(is_batch, self.rows_read, int(first)), tf.int32)
        self._is_batch = is_batch
        try:
            yield [mine, *rest]
        finally:
            self._is_batch = None

    def _may_be_batch(self, shape: Any) -> bool:
        if self.replicas == 1 or not isinstance(shape, list | tuple | tf.TensorShape) or not shape:
            return False
        if self._graph is None:
            return False  # all sizes are numbers
        if not isinstance(shape[0], numbers.Integral) or shape[0] < 2:
            return False
        first = int(shape[0])
        self.asked_batch_size = True
        return self.batch_size in (None, first) and tuple(shape) not in self.weight_shapes

    def note_row_numbers(self, indices: tf.Tensor) -> None:
        """Note that these are numbers of rows in the global batch, for `rows_at`."""
        self._row_numbers.append(indices)

    def rows_at(self, x: Any, indices: Any, axis: int | None) -> Any:
        """The tensor in which `indices` are to be looked up: `x`, or the rows of all replicas."""
        if axis not in (0, None) or not any(indices is each for each in self._row_numbers):
            return x
        return self.all_rows([keras.ops.convert_to_tensor(x)])[0]

    def check_graph(self) -> None:
        """Raise TrainingError in a graph inside of the step's, where replicas cannot meet."""
        if current_graph() is not self._graph:
            raise TrainingError(
                "a sum over replicas must be directly in the body of train_step or call, got one"
                " inside a tf.function, a cond or a loop of the step's own: an optimizer's apply, a"
                " masked loss, a synchronized BatchNormalization or tfd.all_rows. The step is"
                " compiled as a whole already."
            )

    def _times_share(self, value: Gradient) -> Gradient:
        if isinstance(value, tf.IndexedSlices):
            values = self._times_share(value.values)
            return tf.IndexedSlices(values, value.indices, value.dense_shape)
        value = tf.convert_to_tensor(value)
        return tf.math.multiply_no_nan(value, self.batch_fraction(value.dtype))


_NOT_THE_ROWS = (
    "tfd.all_rows(x): axis 0 of x must hold the rows of this replica's part of the batch, one entry"
    " for each row. Call tfd.all_rows before rows are dropped, repeated or put together:"
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
        "tfd.all_rows must get dense tensors of numbers or booleans, whose axis 0 is the batch, got"
        f" {what}. RaggedTensor.to_tensor and tf.sparse.to_dense make dense ones."
    )


def _dtype_of_sums(dtype: tf.DType) -> tf.DType:
    """The dtype in which a tensor travels: collectives sum few of them."""
    return dtype if dtype.is_floating or dtype in (tf.int32, tf.int64) else tf.int64


def _sizes(value: Any) -> list[int | None]:
    """The static shape of a floating tensor; empty for all else."""
    if not tf.is_tensor(value) or not value.dtype.is_floating or value.shape.rank is None:
        return []
    return value.shape.as_list()


# How it is summed, by what the size follows from.
_SUMS: dict[str, Callable[..., Sequence[Gradient]]] = {
    "fixed": lambda here, values, what: sum_up(values, what),
    "elements": StepContext._sum_of_elements,
    "slices": StepContext._sum_of_slices,
}


def _set_shape(value: Gradient, what: Reduced) -> None:
    """Tell TensorFlow the shape of a dense gradient, which it loses where rows are summed.

    What has a known shape is summed together, in one collective.
    """
    if what.kind != "gradient" or what.variable is None or isinstance(value, tf.IndexedSlices):
        return
    if value.shape.is_compatible_with(what.variable.shape):
        value.set_shape(what.variable.shape)


def reduced_for(kind: Kind, variable: keras.Variable | tf.Variable) -> Reduced:
    """What a value of this kind for a Keras variable is."""
    path = getattr(variable, "path", "")
    raw = kp.raw_value(variable) if isinstance(variable, keras.Variable) else variable
    return Reduced(kind=kind, variable=raw, path=path or raw.name.removesuffix(":0"))


def _on_tpu() -> bool:
    return isinstance(tf.distribute.get_strategy(), tf.distribute.TPUStrategy)


def current_step() -> StepContext | None:
    """The part of the replica whose step is running, None outside of one."""
    return getattr(_here, "step", None)


@contextlib.contextmanager
def running_step(value: StepContext | None) -> Iterator[None]:
    """Scope of a replica's step; with None, a scope without a step."""
    before, _here.step = current_step(), value
    functions, called = (value.substitutes, value.called) if value else (None, None)
    try:
        with substitutes(functions, called):
            yield
    finally:
        _here.step = before


def current_graph() -> tf.Graph | None:
    """The graph that is being built, None in eager code."""
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def outside_of_inner_graphs(graph: tf.Graph | None) -> contextlib.AbstractContextManager[Any]:
    """Scope in which operations go to the given outer graph, or run at once where it is None."""
    if current_graph() is graph:
        return contextlib.nullcontext()
    return tf.init_scope() if graph is None else graph.as_default()


@filter_traceback
def all_rows(x: Any) -> Any:
    """The rows of all replicas, in the order of the global batch.

    For what looks at more than one row at a time: losses over in-batch negatives (SimCLR, CLIP,
    retrieval), statistics over the batch (Barlow Twins), queues of features (MoCo, NNCLR). Use it
    in `call`, `train_step`, `test_step`, a loss or a metric; every replica must call it.

        z = tfd.all_rows(self.projector(x))      # (rows of the global batch, width)
        loss = contrastive_loss(z)               # the same number on each replica
        self.queue.assign(tf.concat([z, self.queue[: -tf.shape(z)[0]]], axis=0))

    It is differentiable. The gradient equals that of one device, whether each replica computes the
    loss of all rows, or the mean loss of its own rows against all rows.

    Args:
        x: a tensor of numbers or booleans, or a structure of them (tuples, lists, dicts, None).
            Axis 0 holds this replica's rows of the batch, one entry for each row: call it before
            rows are dropped, repeated or put together.

    Returns:
        The same structure. Axis 0 holds the rows of the global batch. Outside of a step, on one
        replica, and under ParameterServerStrategy (where a global batch is one worker's step), `x`
        as it is.

    Raises:
        TrainingError: not a dense tensor of numbers or booleans; a call inside of a tf.function, a
            cond or a loop of the step's own, where replicas cannot wait for each other.
        tf.errors.InvalidArgumentError: axis 0 has another length than this replica's rows.
    """
    here = current_step()
    if here is None or here.replicas == 1:
        return x
    values = tf.nest.flatten(x)
    rows = iter(here.all_rows([value for value in values if value is not None]))
    return tf.nest.pack_sequence_as(x, [None if value is None else next(rows) for value in values])
