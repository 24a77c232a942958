"""Checks of what the hooks of a StrategyTemplate return, each time they are asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist_ext.errors import StrategyError
from tfdist_ext.messages import shown
from tfdist_ext.placement import VariableSpec
from tfdist_ext.placement.live.creating import is_partitioned, pieces_of

__all__ = [
    "check_created",
    "check_dataset",
    "check_owner",
    "check_read",
    "check_reduced",
    "check_updated",
]


def check_created(
    strategy: tf.distribute.Strategy,
    made: Any,
    spec: VariableSpec,
    by_create: Sequence[tf.Variable],
    beside: tf.Variable | None = None,
) -> None:
    """Raise StrategyError unless `create` has made the variable.

    Beside a variable in pieces it must be in such pieces, if it has rows for all of them: both are
    updated piece by piece.

    Args:
        by_create: what `create` has returned to the hook.
    """
    if not any(made is each for each in by_create):
        wanted = f"the variable that create() makes of {spec.path!r}"
        raise _wrong(strategy, "create_variable", wanted, made)
    if beside is not None and is_partitioned(beside) and made.shape[:1] == beside.shape[:1]:
        rows = [end for _, _, end in pieces_of(beside)]
        if [end for _, _, end in pieces_of(made)] != rows:
            wanted = f"a variable of {len(rows)} pieces, as {beside.name!r} beside it has"
            raise _wrong(strategy, "create_variable", wanted, made)


def check_owner(strategy: tf.distribute.Strategy, number: Any, variable: tf.Variable) -> int:
    """The number that `owner` returned, or StrategyError."""
    count = len(strategy.devices)
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < count:
        what = f"the number of a device, from 0 to {count - 1}, for {variable.name!r}"
        raise _wrong(strategy, "owner", what, number)
    return number


def check_read(strategy: tf.distribute.Strategy, value: Any, variable: tf.Variable) -> Any:
    """The tensor that `read_variable` returned, or StrategyError."""
    is_value = tf.is_tensor(value) or isinstance(value, tf.Variable)
    if not is_value or not _alike(value, variable):
        what = f"a tensor of shape {variable.shape} and {variable.dtype.name} for {variable.name!r}"
        raise _wrong(strategy, "read_variable", what, value)
    return value


def check_updated(
    strategy: tf.distribute.Strategy, results: object, variable: tf.Variable, copies: int
) -> None:
    """Raise StrategyError unless there is a result for each copy."""
    if not isinstance(results, list | tuple) or len(results) != copies:
        what = f"a list of {copies}, what update() returned for each copy of {variable.name!r}"
        raise _wrong(strategy, "update_variable", what, results)


def check_reduced(
    strategy: tf.distribute.Strategy,
    results: Any,
    parts: Sequence[tf.Tensor | tf.IndexedSlices],
    devices: Sequence[str],
) -> None:
    """Raise StrategyError unless there is a value like the replicas' for each device."""
    if not isinstance(results, list | tuple) or len(results) != len(devices):
        what = f"a list of {len(devices)}, a value for each of the devices it is wanted on"
        raise _wrong(strategy, "reduce_values", what, results)
    for result in results:
        slices = isinstance(parts[0], tf.IndexedSlices) or isinstance(result, tf.IndexedSlices)
        if not tf.is_tensor(result) or not (slices or _alike(result, parts[0])):
            what = f"values like those that it gets, as {shown(parts[0])}"
            raise _wrong(strategy, "reduce_values", what, result)


def check_dataset(strategy: tf.distribute.Strategy, made: object) -> None:
    """Raise StrategyError unless it is a distributed dataset."""
    if not isinstance(made, tf.distribute.DistributedDataset):
        what = "a tf.distribute.DistributedDataset, as super().distribute_dataset() does"
        raise _wrong(strategy, "distribute_dataset", what, made)


def _alike(value: Any, other: Any) -> bool:
    """Whether shape and dtype fit. The mean of integers has another dtype."""
    same_dtype = value.dtype == other.dtype or not other.dtype.is_floating
    return same_dtype and other.shape.is_compatible_with(value.shape)


def _wrong(
    strategy: tf.distribute.Strategy, hook: str, wanted: str, returned: object
) -> StrategyError:
    return StrategyError(
        f"{type(strategy).__name__}.{hook} must return {wanted}, got {shown(returned)}."
    )
