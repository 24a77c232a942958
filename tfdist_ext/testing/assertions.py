"""Assertions for tests of distributed training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist_ext.training.verify import verify
from tfdist_ext.user_frames import filter_traceback

__all__ = ["assert_same_on_all_replicas", "assert_trains_like_one_device"]


@filter_traceback
def assert_same_on_all_replicas(
    value: Any, *, strategy: tf.distribute.Strategy | None = None, atol: float = 0.0
) -> None:
    """Assert that every replica has the same value, NaN being equal to NaN.

    Args:
        value: what `strategy.run` returned, a variable, or a structure of them.
        strategy: the strategy of the value; None: the strategy of the open scope. With several
            workers it is required, and all workers must call this, because their values are
            gathered.
        atol: the largest difference.

    Raises:
        AssertionError: with the replica, the place and the values.
    """
    strategy = strategy or tf.distribute.get_strategy()
    for keys, leaf in keras.tree.flatten_with_path(value):
        name = getattr(leaf, "path", getattr(leaf, "name", "value"))
        path = "/".join([*map(str, keys), name])
        tensor = leaf.value if isinstance(leaf, keras.Variable) else leaf
        by_replica = _by_replica(tensor, strategy)
        for number, other in enumerate(by_replica[1:], start=1):
            np.testing.assert_allclose(
                other, by_replica[0], rtol=0, atol=atol, err_msg=f"{path}: replicas {number} and 0"
            )


@filter_traceback
def assert_trains_like_one_device(
    builder: Callable[[], keras.Model],
    data: Any,
    strategy: tf.distribute.Strategy,
    *,
    tolerance: float = 1e-6,
    **options: Any,
) -> None:
    """Assert that `tfd.verify` finds a model equal on a strategy and on one device.

    Args:
        builder: as of `tfd.verify`.
        data: as of `tfd.verify`.
        strategy: as of `tfd.verify`.
        tolerance: the largest relative difference of a variable, log or prediction. A difference
            that rounding explains counts as equal, too.
        options: more arguments of `tfd.verify`, such as steps, batch_size (global) and epochs.

    Raises:
        AssertionError: with the table of `tfd.verify`: what differs, by how much, and why.
    """
    result = verify(builder, data, strategy, tolerance=tolerance, **options)
    if not result.equal:
        raise AssertionError(str(result))


def _by_replica(value: Any, strategy: tf.distribute.Strategy) -> list[np.ndarray]:
    if strategy.extended._in_multi_worker_mode():
        row = strategy.run(lambda v: tf.convert_to_tensor(v)[tf.newaxis], args=(value,))
        return list(strategy.gather(row, axis=0).numpy())
    if isinstance(value, tf.distribute.DistributedValues):
        return [np.asarray(each) for each in strategy.experimental_local_results(value)]
    return [np.asarray(value)]
