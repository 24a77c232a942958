"""Optimizers whose slots are shared among workers, under `shard_optimizer=True`.

Each worker has all weights, and owns a part of each of them. Keras builds the optimizer for the
parts (`OwnPart`) instead of the weights, so the slots on a worker have the shapes of its parts. A
step updates the parts, and all workers gather the new weights.

The build waits until all workers have the chief's weights, because slots may start from weights.
A `ShardedSlot` stands for the whole slot where a model is saved or restored.

Source: Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054; Xu et al. 2020,
https://arxiv.org/abs/2004.13336.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist_ext.errors import TrainingError
from tfdist_ext.placement.live.by_row import rows_can_be_owned
from tfdist_ext.placement.planning import plan_owners
from tfdist_ext.placement.specs import VariableShard, VariableSpec
from tfdist_ext.strategies.owned_sums import OwnedSums, Owners, owned_sums_of
from tfdist_ext.training._keras_private import (
    clipping_of,
    decide_weight_decay,
    noting_slots,
    optimizer_builds,
    raw_value,
    redirect_methods,
    replacing,
    substitutes,
)
from tfdist_ext.training.variables import (
    LocalCopies,
    default_strategy_scope,
    local_copy,
    with_inner_optimizers,
)
from tfdist_ext.user_frames import warn

__all__ = [
    "OptimizerShards",
    "OwnPart",
    "ShardedSlot",
    "deferring_builds",
    "shards_of",
    "sums_of_parts",
]

_SHARDS = "_tfdist_ext_shards"  # an attribute of an optimizer


class OwnPart:
    """The rows of a weight that this worker owns, as an optimizer sees a variable.

    It has a value, a tensor, only while a step updates it: a part takes no memory.

    Args:
        variable: the weight.
        shards: the rows of each owner.
        worker: the number of this worker.

    Attributes:
        value: of the part, in a step.
        rows: (first row, row after the last) of the rows that this worker owns.
        owners: the elements of each owner.
    """

    def __init__(self, variable: keras.Variable, shards: Sequence[VariableShard], worker: int):
        self.variable = variable
        self.rows = [(each.start, each.stop) for each in shards if each.task == worker]
        row_size = math.prod(tuple(variable.shape)[1:])
        self.owners: Owners = [
            (task, start * row_size, stop * row_size) for task, start, stop in shards
        ]
        owned = sum(stop - start for start, stop in self.rows)
        is_own_scalar = not variable.shape and owned
        self._shape = () if is_own_scalar else (owned, *tuple(variable.shape)[1:])
        self.dtype = variable.dtype
        self.name, self.path = variable.name, variable.path
        self.constraint = variable.constraint
        # Keras finds the slots of a variable, and its weight decay, by this.
        self._unique_id = raw_value(variable)._unique_id
        self.value: tf.Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the part. A scalar that another worker owns has the shape (0,)."""
        return self._shape

    @property
    def size(self) -> int:
        """Elements of the part."""
        return math.prod(self._shape)

    def of_whole(self, value: tf.Tensor) -> tf.Tensor:
        """Returns the rows of a tensor of the weight's shape that this worker owns."""
        if not value.shape.rank:
            return value if self.rows else tf.zeros([0], value.dtype)
        rows = [value[start:stop] for start, stop in self.rows]
        return tf.concat([value[:0], *rows], 0) if len(rows) != 1 else rows[0]

    def of_slices(self, value: tf.IndexedSlices) -> tf.IndexedSlices:
        """Returns the slices of rows that this worker owns, with indices into the part."""
        values, indices, before = [value.values[:0]], [value.indices[:0]], 0
        for start, stop in self.rows:
            mine = (value.indices >= start) & (value.indices < stop)
            values.append(tf.boolean_mask(value.values, mine))
            indices.append(tf.boolean_mask(value.indices, mine) - start + before)
            before += stop - start
        shape = tf.constant(self.shape)
        return tf.IndexedSlices(tf.concat(values, 0), tf.concat(indices, 0), shape)

    def read_value(self) -> tf.Tensor:
        assert self.value is not None, "a part has a value only in a step"
        return self.value

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        return tf.convert_to_tensor(self.read_value(), dtype)

    def assign(self, value: Any) -> None:
        self.value = tf.ensure_shape(tf.cast(value, self.dtype), self.shape)

    def assign_add(self, value: Any) -> None:
        self.assign(self.read_value() + value)

    def assign_sub(self, value: Any) -> None:
        self.assign(self.read_value() - value)

    def scatter_add(self, value: tf.IndexedSlices) -> None:
        self._scatter(tf.tensor_scatter_nd_add, value)

    def scatter_sub(self, value: tf.IndexedSlices) -> None:
        self._scatter(tf.tensor_scatter_nd_sub, value)

    def scatter_update(self, value: tf.IndexedSlices) -> None:
        self._scatter(tf.tensor_scatter_nd_update, value)

    def _scatter(self, scatter: Callable[..., tf.Tensor], value: tf.IndexedSlices) -> None:
        self.assign(scatter(self.read_value(), value.indices[:, tf.newaxis], value.values))


def _of_value(name: str) -> Callable[..., tf.Tensor]:
    def operator(self: OwnPart, *args: Any) -> tf.Tensor:
        return getattr(self.read_value(), name)(*args)

    return operator


for _name in ("add", "sub", "mul", "truediv", "pow", "matmul"):
    setattr(OwnPart, f"__{_name}__", _of_value(f"__{_name}__"))
    setattr(OwnPart, f"__r{_name}__", _of_value(f"__r{_name}__"))
for _name in ("neg", "abs", "getitem"):
    setattr(OwnPart, f"__{_name}__", _of_value(f"__{_name}__"))


class ShardedSlot:
    """A slot of which each worker has a part.

    Attributes:
        variable: the part of this worker.
        shape: of the whole slot, a tuple.
        dtype: Keras's name of the dtype.
        rows: (first row, row after the last) of the rows that this worker has.
        whole: the value of the whole slot, in this process while a model is saved or restored.
    """

    def __init__(
        self, variable: keras.Variable, shape: tuple[int, ...], rows: Sequence[tuple[int, int]]
    ):
        self.variable = variable
        self.shape = shape
        self.dtype = variable.dtype
        self.rows = rows
        self.whole: np.ndarray | None = None

    @property
    def gathered(self) -> np.ndarray:
        """The value of the whole slot, which must be in this process."""
        assert self.whole is not None, "gather_slots must be called before"
        return self.whole

    def own(self) -> np.ndarray:
        """The rows of this worker."""
        return np.atleast_1d(raw_value(self.variable).numpy())

    def assign_own(self, rows: np.ndarray) -> None:
        """Assigns the rows of this worker."""
        if self.rows:
            self.variable.assign(rows.reshape(tuple(self.variable.shape)))


class _UpdatesOfParts:
    """Stands in for an optimizer's strategy: updates parts, if they have elements."""

    @property
    def extended(self) -> _UpdatesOfParts:
        return self

    def update(
        self,
        var: OwnPart | tf.Variable,
        fn: Callable[..., object],
        args: Sequence[Any] = (),
        group: bool = True,
    ) -> None:
        if not isinstance(var, OwnPart) or var.size:
            fn(var, *args)

    def colocate_vars_with(self, var: OwnPart) -> contextlib.AbstractContextManager[None]:
        """Returns a scope in which a slot is made beside a part."""
        return contextlib.nullcontext()


class OptimizerShards:
    """An optimizer, and the parts for which it is built on this worker.

    Args:
        variables: the weights that it trains.

    Attributes:
        parts: of the weights; empty before `build`.
        slots: the slots of the optimizer, and of those inside it.
        initial: the values of all variables of the optimizer that it is a copy of, or None.
    """

    def __init__(self, optimizer: keras.optimizers.Optimizer, variables: Sequence[keras.Variable]):
        self.optimizer = optimizer
        self.variables = list(variables)
        self.parts: list[OwnPart] = []
        self.slots: list[ShardedSlot] = []
        self.initial: list[np.ndarray] | None = None
        self._part_of: dict[int, OwnPart] = {}
        vars(optimizer)[_SHARDS] = self

    def build(
        self, strategy: tf.distribute.Strategy, shapes_of_owners: Callable[[np.ndarray], np.ndarray]
    ) -> None:
        """Builds the optimizer for this worker's parts, in the scope of the strategy.

        Args:
            shapes_of_owners: the sum over workers; every worker must call.
        """
        sums, optimizer = _sums_of(strategy), self.optimizer
        if any(getattr(each, "overwrite_with_gradient", False) for each in self.variables):
            raise TrainingError(
                "shard_optimizer=True does not support float8 training, which writes gradients into"
                " variables. Create the strategy without it."
            )
        specs = [
            VariableSpec(str(number), tuple(variable.shape), variable.dtype)
            for number, variable in enumerate(self.variables)
        ]
        cut = [rows_can_be_owned(variable, optimizer) for variable in self.variables]
        plan = plan_owners(specs, sums.workers, is_cut=lambda spec: cut[int(spec.path)])
        self.parts = [
            OwnPart(variable, plan.owned_shards_of(spec.path), sums.worker)
            for variable, spec in zip(self.variables, specs, strict=True)
        ]
        self._part_of = {id(part.variable): part for part in self.parts}
        optimizer.built = False
        with self._loaded(strategy), noting_slots(OwnPart, _UpdatesOfParts()) as noted:
            optimizer.build(self.parts)
        self._describe_slots(noted, shapes_of_owners)
        for each in with_inner_optimizers(optimizer):
            decide_weight_decay(each, [raw_value(variable) for variable in self.variables])
            self._redirect_saving(each)
        if self.initial is not None:
            self._assign_initial()

    def part_of(self, variable: keras.Variable) -> OwnPart | keras.Variable:
        """Returns the part of a weight; a variable that is not trained as it is."""
        return self._part_of.get(id(variable), variable)

    @contextlib.contextmanager
    def updating(self, strategy: tf.distribute.Strategy) -> Iterator[None]:
        """Scope in which the optimizer updates parts. At its end all workers get the weights."""
        optimizers = with_inner_optimizers(self.optimizer)
        copies = LocalCopies(lambda variable: local_copy(variable, strategy, 0), optimizers)
        sums = _sums_of(strategy)
        with self._loaded(strategy), contextlib.ExitStack() as stack:
            stack.enter_context(default_strategy_scope(optimizers, _UpdatesOfParts()))
            stack.enter_context(copies)
            for each in optimizers:
                stack.enter_context(_over_all_workers(each, sums))
            yield
            values = [tf.reshape(part.read_value(), [-1]) for part in self.parts]
        whole = sums.gather(values, [part.owners for part in self.parts])
        for part, value in zip(self.parts, whole, strict=True):
            copy = local_copy(part.variable, strategy, 0)
            copy.assign(tf.reshape(value, part.variable.shape))

    def finalize(self) -> None:
        """Replaces the weights by averaged ones, in a replica's context."""
        with self.updating(tf.distribute.get_strategy()):
            self.optimizer.finalize_variable_values(self.parts)

    @contextlib.contextmanager
    def _loaded(self, strategy: tf.distribute.Strategy) -> Iterator[None]:
        """Scope in which parts have values."""
        for part in self.parts:
            part.value = part.of_whole(local_copy(part.variable, strategy, 0).read_value())
        try:
            with substitutes({"cond": self._cond, "add": _add}):
                yield
        finally:
            for part in self.parts:
                part.value = None

    def _cond(
        self,
        original: Callable[..., Any],
        pred: tf.Tensor,
        true_fn: Callable[[], object],
        false_fn: Callable[[], object],
    ) -> None:
        """A cond whose branches may write parts."""
        before = [part.value for part in self.parts]

        def values_after(function: Callable[[], object]) -> list[tf.Tensor | None]:
            for part, value in zip(self.parts, before, strict=True):
                part.value = value
            function()
            return [part.value for part in self.parts]

        after = original(pred, lambda: values_after(true_fn), lambda: values_after(false_fn))
        for part, value in zip(self.parts, after, strict=True):
            part.value = value

    def _describe_slots(
        self,
        noted: Sequence[tuple[keras.Variable, OwnPart]],
        sum_over_workers: Callable[[np.ndarray], np.ndarray],
    ) -> None:
        """Finds the whole shape of each slot. A slot may be smaller than its weight (Adafactor)."""
        if not noted:
            return  # TensorFlow crashes where workers sum nothing
        own = [
            tuple(slot.shape) if part.size and tuple(slot.shape) != part.shape else ()
            for slot, part in noted
        ]
        rank = max([len(slot.shape) for slot, _ in noted], default=0)
        table = np.zeros([len(noted), rank + 1], np.int64)
        for line, shape in zip(table, own, strict=True):
            line[: len(shape)] = shape
        shapes = sum_over_workers(table)
        for (slot, part), line in zip(noted, shapes.tolist(), strict=True):
            if tuple(slot.shape) == part.shape and not any(line):
                self.slots.append(ShardedSlot(slot, tuple(part.variable.shape), part.rows))
            else:
                shape = tuple(line[: len(slot.shape)])
                self.slots.append(ShardedSlot(slot, shape, [(0, shape[0])] if part.size else []))

    def _redirect_saving(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Lets Keras save and load whole slots; see `ShardedSlot.whole`."""
        slots, load = {id(slot.variable): slot for slot in self.slots}, optimizer.load_own_variables

        def save_own_variables(store: Any) -> None:
            if any(slot.whole is None for slot in self.slots):
                warn(
                    "The file is written without the state of the optimizer, which all workers"
                    " share (shard_optimizer=True). Use fit(checkpoint_dir=...), or call save() of"
                    " the distributed model on every worker."
                )
                return
            for number, each in enumerate(optimizer.variables):
                slot = slots.get(id(each))
                store[str(number)] = raw_value(each).numpy() if slot is None else slot.whole

        def load_own_variables(store: Any) -> None:
            if len(store.keys()) != len(optimizer.variables):
                return load(store)
            for number, each in enumerate(optimizer.variables):
                if id(each) in slots:
                    slots[id(each)].whole = np.asarray(store[str(number)])
                else:
                    each.assign(store[str(number)])

        vars(optimizer)["save_own_variables"] = save_own_variables
        vars(optimizer)["load_own_variables"] = load_own_variables

    def _assign_initial(self) -> None:
        """Takes the state of the optimizer that this one is a copy of, whole or also in parts."""
        assert self.initial is not None
        slots = {id(slot.variable): slot for slot in self.slots}
        for variable, value in zip(self.optimizer.variables, self.initial, strict=True):
            if id(variable) in slots and value.shape != tuple(variable.shape):
                slots[id(variable)].whole = value
            else:
                variable.assign(value)
        self.initial = None


def sums_of_parts(
    values: Sequence[tf.Tensor], parts: Sequence[OwnPart], strategy: tf.distribute.Strategy
) -> list[tf.Tensor]:
    """Returns the sum over workers of each part of values that have the weights' shapes."""
    found = _sums_of(strategy).reduce(values, [part.owners for part in parts])
    return [tf.reshape(each, part.shape) for each, part in zip(found, parts, strict=True)]


def shards_of(optimizer: keras.optimizers.Optimizer) -> OptimizerShards | None:
    """Returns what `shard_optimizer=True` has made of an optimizer; None without it."""
    found = vars(optimizer).get(_SHARDS)
    return found if isinstance(found, OptimizerShards) else None


@contextlib.contextmanager
def deferring_builds(strategy: tf.distribute.Strategy) -> Iterator[None]:
    """Scope in which optimizers remember the weights for which they are to be built.

    Without `shard_optimizer=True` they are built as usual.
    """
    if owned_sums_of(strategy) is None:
        yield
        return

    def remember(
        original: object, optimizer: keras.optimizers.Optimizer, variables: Sequence[keras.Variable]
    ) -> None:
        if not optimizer.built:
            OptimizerShards(optimizer, variables)
            optimizer.built = True

    with replacing(optimizer_builds()), substitutes({"build": remember}):
        yield


def _sums_of(strategy: tf.distribute.Strategy) -> OwnedSums:
    sums = owned_sums_of(strategy)
    assert sums is not None
    return sums


def _add(original: Callable[..., tf.Tensor], x1: Any, x2: Any) -> tf.Tensor:
    is_empty = 0 in (getattr(x1, "shape", None) or ())
    return tf.add(tf.convert_to_tensor(x1), x2) if is_empty else original(x1, x2)


@contextlib.contextmanager
def _over_all_workers(optimizer: keras.optimizers.Optimizer, sums: OwnedSums) -> Iterator[None]:
    """Scope in which norms and checks of gradients are those of all workers' parts together."""

    def squares(gradient: tf.Tensor | tf.IndexedSlices) -> tf.Tensor:
        is_sparse = isinstance(gradient, tf.IndexedSlices)  # Keras does not add up slices of a row
        return tf.reduce_sum(tf.square(gradient.values if is_sparse else gradient))

    def total(values: list[tf.Tensor]) -> list[tf.Tensor]:
        dtype = values[0].dtype if values[0].dtype.size >= 4 else tf.float32
        return tf.unstack(sums.total(tf.stack([tf.cast(value, dtype) for value in values])))

    def scaled(gradient: tf.Tensor | tf.IndexedSlices, factor: tf.Tensor) -> Any:
        if optimizer.clipnorm and isinstance(gradient, tf.IndexedSlices):
            values = scaled(gradient.values, factor)
            return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
        return tf.convert_to_tensor(gradient) * tf.cast(factor, gradient.dtype)

    def clip(grads: Sequence[Any]) -> list[Any]:
        each, of_all = optimizer.clipnorm, optimizer.global_clipnorm
        if not (each or of_all):
            return clip_values(grads)
        norms = [tf.sqrt(value) for value in total(list(map(squares, grads)))]
        if not each:
            norms = [tf.norm(tf.stack(norms))] * len(grads)
        limit = each or of_all
        return [
            scaled(gradient, limit / tf.maximum(norm, limit))
            for gradient, norm in zip(grads, norms, strict=True)
        ]

    def check_finite(grads: Sequence[Any]) -> tf.Tensor:
        own = tf.cast(original_check(grads), tf.float32)
        return total([1.0 - own])[0] == 0.0

    methods: dict[str, Callable[..., Any]] = {"_clip_gradients": clip}
    clip_values = clipping_of(optimizer)
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        original_check = optimizer.check_finite
        methods["check_finite"] = check_finite
    with redirect_methods(optimizer, **methods):
        yield
