"""Assertions for tests of distributed training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist_ext.training import distribute
from tfdist_ext.user_frames import filter_traceback

__all__ = ["assert_same_on_all_replicas", "assert_trains_like_one_device"]

_SEED = 1337


@filter_traceback
def assert_same_on_all_replicas(
    value: Any, *, strategy: tf.distribute.Strategy | None = None, atol: float = 0.0
) -> None:
    """Assert that every replica has the same value, NaN being equal to NaN.

    Args:
        value: what `strategy.run` returned, a variable, or a structure of them.
        strategy: that the value is of; None: the one whose scope is open. With several workers it
            is needed, and all workers have to ask: their values are gathered.
        atol: largest difference.

    Raises:
        AssertionError: with the replica, the place and the values.
    """
    strategy = strategy or tf.distribute.get_strategy()
    for path, leaf in _flat(value):
        by_replica = _by_replica(leaf, strategy)
        for number, other in enumerate(by_replica[1:], start=1):
            np.testing.assert_allclose(
                other, by_replica[0], rtol=0, atol=atol, err_msg=f"{path}: replicas {number} and 0"
            )


@filter_traceback
def assert_trains_like_one_device(
    builder: Callable[[], keras.Model],
    data: Any,
    strategy: tf.distribute.Strategy,
    atol: float = 1e-6,
    **fit: Any,
) -> None:
    """Assert that `fit` under a strategy gives the weights and losses of plain Keras.

    Both models begin with the same weights. Under a strategy with several workers each of them
    has to call this, with the same data.

    Args:
        builder: makes the compiled model; called once, with fixed seeds.
        data: arrays (x, y) or (x, y, sample_weight), or a `tf.data.Dataset` of global batches.
        strategy: as of `tfd.create_strategy`.
        atol: largest difference of a weight, of a loss or metric in the history.
        fit: more arguments of `fit`, as batch_size (global) and epochs. Nothing is shuffled.

    Raises:
        AssertionError: with the variable or log that differs most, and by how much.
    """
    keras.utils.set_random_seed(_SEED)
    plain = builder()
    distributed = distribute(plain, strategy)
    arguments = data if isinstance(data, tuple) else (data,)
    x, y, weights = (*arguments, None, None)[:3]
    found = []
    for model in (plain, distributed):
        keras.utils.set_random_seed(_SEED)
        given = {"shuffle": False, "verbose": 0, "sample_weight": weights, **fit}
        history = model.fit(x, y, **given).history
        inner: Any = getattr(model, "keras_model", model)
        found.append(
            {
                **{variable.path: variable.numpy() for variable in inner.weights},
                **{f"{name} of fit": np.asarray(values) for name, values in history.items()},
            }
        )
    _assert_equal(found[0], found[1], atol)


def _assert_equal(wanted: dict[str, np.ndarray], found: dict[str, np.ndarray], atol: float) -> None:
    assert list(found) == list(wanted), f"there are {list(found)}, and not {list(wanted)}"
    worst, most = "", -1.0
    for name, value in wanted.items():
        apart = np.abs(np.asarray(found[name], "float64") - np.asarray(value, "float64"))
        largest = float(np.nan_to_num(apart, nan=np.inf).max(initial=0.0))
        if largest > most:
            worst, most = name, largest
    if most > atol:
        raise AssertionError(
            f"not as on one device: {worst} must differ by at most {atol:.2g}, got {most:.2g}.\none"
            f" device: {wanted[worst]!r}\nstrategy: {found[worst]!r}"
        )


def _flat(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, keras.Variable):
        return [(value.path, value.value)]
    if isinstance(value, dict):
        return [(f"{k}/{p}", leaf) for k, item in value.items() for p, leaf in _flat(item)]
    if isinstance(value, list | tuple):
        return [(f"{n}/{p}", leaf) for n, item in enumerate(value) for p, leaf in _flat(item)]
    return [(getattr(value, "name", "value"), value)]


def _by_replica(value: Any, strategy: tf.distribute.Strategy) -> list[np.ndarray]:
    if strategy.extended._in_multi_worker_mode():
        row = strategy.run(lambda v: tf.convert_to_tensor(v)[tf.newaxis], args=(value,))
        return list(strategy.gather(row, axis=0).numpy())
    if isinstance(value, tf.distribute.DistributedValues):
        return [np.asarray(each) for each in strategy.experimental_local_results(value)]
    return [np.asarray(value)]
