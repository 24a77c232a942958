"""Optimizers that workers share, under `shard_optimizer=True`: each updates a part of each weight.

Keras builds the optimizer for the parts instead of the weights, so a worker has the slots of its
parts only. In a step each worker gets the summed gradients of its parts and updates the parts. Then
all workers gather the new weights. A part has no memory of its own: it has a value in an update.

Source: Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054 (stage 1); Xu et al. 2020,
https://arxiv.org/abs/2004.13336.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist_ext.errors import TrainingError
from tfdist_ext.placement.live.learning import rows_can_be_owned, updates_by_row
from tfdist_ext.placement.planning import plan_owners
from tfdist_ext.placement.specs import VariableShard, VariableSpec
from tfdist_ext.strategies.owned_sums import OwnedSums, Owners, sums_of
from tfdist_ext.training._keras_private import (
    ADD,
    COND,
    Original,
    building_again,
    noting_slots,
    optimizer_builds,
    raw_value,
    replaces,
    substitutes,
)
from tfdist_ext.training.steps.row_updates import RowUpdates
from tfdist_ext.training.variables import (
    SHARDED,
    LocalCopies,
    PartOfVariable,
    ShardedSlot,
    Updates,
    default_strategy_scope,
    local_copy,
    with_inner_optimizers,
)
from tfdist_ext.user_frames import warn


class OwnPart(PartOfVariable):
    """The rows of a weight that this worker owns, as an optimizer sees a variable.

    Attributes:
        variable: the weight.
        owners: the elements of each owner.
    """

    def __init__(self, variable: keras.Variable, shards: Sequence[VariableShard], worker: int):
        row_size = math.prod(tuple(variable.shape)[1:])
        self.variable, self.constraint = variable, variable.constraint
        self.owners: Owners = [(task, a * row_size, b * row_size) for task, a, b in shards]
        self._rows = [(a, b) for task, a, b in shards if task == worker]
        self._elements = [(a, b) for task, a, b in self.owners if task == worker]
        owned = sum(b - a for a, b in self._rows)
        is_own_scalar = owned and not variable.shape  # one of another worker has the shape (0,)
        shape = () if is_own_scalar else (owned, *tuple(variable.shape)[1:])
        super().__init__(variable, shape)  # the key is that of weight decay, too

    def of_whole(self, value: tf.Tensor | tf.IndexedSlices) -> tf.Tensor | tf.IndexedSlices:
        """Returns the part of a tensor of the weight's shape, or of slices of its rows."""
        if not isinstance(value, tf.IndexedSlices):
            flat = tf.reshape(value, [-1])
            pieces = [flat[:0], *(flat[a:b] for a, b in self._elements)]
            return tf.reshape(tf.concat(pieces, 0) if len(pieces) != 2 else pieces[1], self.shape)
        values, indices, before = [value.values[:0]], [value.indices[:0]], 0
        for a, b in self._rows:
            is_mine = (value.indices >= a) & (value.indices < b)
            values.append(tf.boolean_mask(value.values, is_mine))
            indices.append(tf.boolean_mask(value.indices, is_mine) - a + before)
            before += b - a
        shape = tf.constant(self.shape)
        return tf.IndexedSlices(tf.concat(values, 0), tf.concat(indices, 0), shape)


class _UpdatesOfParts(Updates):
    """Updates parts, if they have rows."""

    def update(
        self, var: Any, fn: Callable[..., Any], args: Sequence[Any] = (), group: bool = True
    ) -> None:
        if 0 not in var.shape:
            fn(var, *args)

    def colocate_vars_with(self, var: OwnPart) -> contextlib.AbstractContextManager[None]:
        """Returns a scope in which a slot is made beside a part."""
        return contextlib.nullcontext()


class ShardedOptimizer:
    """An optimizer that is built for parts of its weights.

    Attributes:
        optimizer: not built before `build`.
        variables: the weights that it trains.
        parts: of the weights; empty before `build`.
        slots: of the parts, also of the optimizers inside this one.
        initial: values for its variables, if it was built before for whole weights.
    """

    def __init__(self, optimizer: keras.optimizers.Optimizer, variables: Sequence[keras.Variable]):
        self.variables = list(variables)
        self.parts: list[OwnPart] = []
        self.slots: list[ShardedSlot] = []
        self.initial: list[np.ndarray] | None = None
        self.optimizer = optimizer

    def build(self, strategy: tf.distribute.Strategy) -> None:
        """Builds the optimizer for this worker's parts, in the scope of the strategy.

        All workers must have the same weights: slots may start from them.
        """
        sums, optimizer = _sums_of(strategy), self.optimizer
        if any(getattr(variable, "overwrite_with_gradient", False) for variable in self.variables):
            raise TrainingError(
                "float8 training is not supported with shard_optimizer=True. Leave it out."
            )
        for inner in with_inner_optimizers(optimizer):
            if not type(inner).__module__.startswith("keras.") and not updates_by_row(inner):
                warn(
                    f"{type(inner).__name__} is an optimizer of your own, of which each worker"
                    " updates only its own weights (shard_optimizer=True). If an update combines"
                    " several weights, the training differs from one device. If it computes element"
                    " by element, set updates_by_row = True in the class."
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
        for inner in with_inner_optimizers(optimizer):
            inner.built = False
        again: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self.initial is not None:
            again = building_again(with_inner_optimizers(optimizer))
        try:
            with again, self._loaded(strategy), noting_slots(OwnPart, _UpdatesOfParts()) as noted:
                optimizer.build(self.parts)
            self.slots = [_slot_of(variable, part) for variable, part in noted]
        except BaseException:
            self.parts = []  # the next call builds again, and fails with the same error
            raise
        for inner in with_inner_optimizers(optimizer):
            vars(inner)["save_own_variables"] = functools.partial(_save, inner, self.slots)
        for part in self.parts:
            # Keras looks for the names of variables without weight decay there, but for Muon.
            if not isinstance(optimizer, keras.optimizers.Muon):
                part.name = raw_value(part.variable).name

    def assign_initial(self) -> None:
        """Assigns the values that the optimizer had before, to whole slots."""
        for variable, value in zip(self.optimizer.variables, self.initial or (), strict=True):
            variable.assign(value)

    @contextlib.contextmanager
    def updating(self, strategy: tf.distribute.Strategy, *, lazy: bool) -> Iterator[None]:
        """Scope in which the optimizer updates parts. At its end all workers get the weights."""
        optimizers, sums = with_inner_optimizers(self.optimizer), _sums_of(strategy)
        copies = LocalCopies(lambda variable: local_copy(variable, strategy, 0), optimizers)
        over_workers = {
            replacement: functools.partial(replacement.function, sums)
            for replacement in (clip_gradients, check_finite)
        }
        updates = RowUpdates(_UpdatesOfParts(), optimizers, lazy)
        scope = default_strategy_scope(optimizers, updates)
        with self._loaded(strategy), scope, copies, substitutes(over_workers):
            yield
            updates.check_decays()
            values = [part.read_value() for part in self.parts]
        owners = [part.owners for part in self.parts]
        for part, value in zip(self.parts, sums.gather(values, owners), strict=True):
            shape = part.variable.shape
            local_copy(part.variable, strategy, 0).assign(tf.reshape(value, shape))

    def finalize(self) -> None:
        """Replaces the weights by averaged ones, in a replica's context."""
        with self.updating(tf.distribute.get_strategy(), lazy=False):
            self.optimizer.finalize_variable_values(self.parts)

    @contextlib.contextmanager
    def _loaded(self, strategy: tf.distribute.Strategy) -> Iterator[None]:
        """Scope in which parts have values."""
        for part in self.parts:
            part.value = part.of_whole(local_copy(part.variable, strategy, 0).read_value())
        with substitutes({cond: functools.partial(cond.function, self), add: add.function}):
            yield
        for part in self.parts:
            part.value = None

    def assign(self, values: Sequence[tf.Tensor | None]) -> None:
        """Gives each part a value."""
        for part, value in zip(self.parts, values, strict=True):
            part.value = value


@replaces(COND)
def cond(
    shared: ShardedOptimizer, original: Original, pred: Any, *branches: Callable[[], object]
) -> None:
    """Lets both branches of an optimizer's update write the parts of `shard_optimizer=True`."""
    before = [part.value for part in shared.parts]

    def values_after(branch: Callable[[], object]) -> list[tf.Tensor | None]:
        shared.assign(before)
        branch()
        return [part.value for part in shared.parts]

    shared.assign(original(pred, *(functools.partial(values_after, branch) for branch in branches)))


def sums_of_parts(values: Sequence[tf.Tensor], parts: Sequence[OwnPart]) -> list[tf.Tensor]:
    """Returns the sum over workers of each part of gradients, which have the weights' shapes."""
    sums = _sums_of(tf.distribute.get_strategy())
    totals = sums.reduce(values, [part.owners for part in parts])
    return [tf.reshape(total, part.shape) for total, part in zip(totals, parts, strict=True)]


@contextlib.contextmanager
def deferring_builds() -> Iterator[None]:
    """Scope in which optimizers only note which weights they are built for."""

    def note(original: object, optimizer: keras.optimizers.Optimizer, variables: Any) -> None:
        if not optimizer.built:
            vars(optimizer)[SHARDED] = ShardedOptimizer(optimizer, variables)
            optimizer.built = True

    with substitutes(dict.fromkeys(optimizer_builds(), note)):
        yield


def _save(optimizer: keras.optimizers.Optimizer, slots: Sequence[ShardedSlot], store: Any) -> None:
    """An optimizer's `save_own_variables`, which skips a state in parts."""
    if all(tuple(slot.variable.shape) == slot.shape for slot in slots):
        return type(optimizer).save_own_variables(optimizer, store)
    warn(
        "The file is written without the state of the optimizer, which workers share"
        " (shard_optimizer=True). Use fit(checkpoint_dir=...), or call save() of the distributed"
        " model on every worker."
    )


def _slot_of(variable: keras.Variable, part: OwnPart) -> ShardedSlot:
    """A slot has the rows of its part, or belongs to the owner of the whole weight (Adafactor)."""
    shape = tuple(part.variable.shape)
    if tuple(variable.shape) == part.shape:
        return ShardedSlot(variable, shape, part.owners)
    if not tuple(variable.shape):
        raise TrainingError(
            f"shard_optimizer=True is not possible: the optimizer has a variable {variable.path!r}"
            " for all weights, but each worker updates only its own weights. Leave it out."
        )
    rows, *rest = variable.shape
    shape = (shape[0] if rows == part.shape[0] else rows, *rest)
    return ShardedSlot(variable, shape, [(part.owners[0][0], 0, math.prod(shape))])


def _sums_of(strategy: tf.distribute.Strategy) -> OwnedSums:
    sums = sums_of(strategy).owned
    assert sums is not None
    return sums


@replaces(ADD)
def add(original: Original, x1: Any, x2: Any) -> tf.Tensor:
    """Adds parts without rows; Keras takes a matrix without rows for a bias."""
    is_empty = 0 in (getattr(x1, "shape", None) or ())
    return tf.add(tf.convert_to_tensor(x1), x2) if is_empty else original(x1, x2)


@replaces("keras:optimizers.Optimizer._clip_gradients")
def clip_gradients(
    sums: OwnedSums, original: Original, optimizer: keras.optimizers.Optimizer, grads: Sequence[Any]
) -> list[Any]:
    """Clips by the norms of whole gradients under `shard_optimizer=True`."""
    limit = optimizer.clipnorm or optimizer.global_clipnorm
    if not limit:
        return original(optimizer, grads)

    def squares(gradient: tf.Tensor | tf.IndexedSlices) -> tf.Tensor:
        is_sparse = isinstance(gradient, tf.IndexedSlices)  # Keras does not add up slices of a row
        value = tf.square(gradient.values if is_sparse else gradient)
        value = value if value.dtype.size > 2 else tf.cast(value, tf.float32)
        return tf.cast(tf.reduce_sum(value), tf.float64)

    def scaled(gradient: Any, factor: tf.Tensor) -> Any:
        if optimizer.clipnorm and isinstance(gradient, tf.IndexedSlices):
            values = scaled(gradient.values, factor)
            return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
        return tf.convert_to_tensor(gradient) * tf.cast(factor, gradient.dtype)

    norms = tf.sqrt(sums.total(tf.stack(list(map(squares, grads)))))
    factors = limit / tf.maximum(norms, limit)
    if not optimizer.clipnorm:
        norm = tf.norm(norms)  # if it is infinite, the result is NaN, as in Keras
        factors = tf.fill([len(grads)], limit / tf.maximum(norm, limit) + (norm - norm))
    return list(map(scaled, grads, tf.unstack(factors, len(grads))))


@replaces("keras:optimizers.LossScaleOptimizer.check_finite")
def check_finite(
    sums: OwnedSums, original: Original, optimizer: keras.optimizers.Optimizer, grads: Sequence[Any]
) -> tf.Tensor:
    """Checks the gradients of all workers under `shard_optimizer=True`."""
    is_finite = tf.reshape(original(optimizer, grads), [1])
    return sums.total(1.0 - tf.cast(is_finite, tf.float32))[0] == 0.0
