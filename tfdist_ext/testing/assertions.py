"""Assertions for tests of distributed training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist_ext.training import DistributedModel, distribute
from tfdist_ext.user_frames import filter_traceback

__all__ = [
    "assert_close",
    "assert_same_on_all_replicas",
    "assert_trains_like_one_device",
    "train_both",
]

_SEED = 1337


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
    atol: float = 1e-6,
    **fit: Any,
) -> None:
    """Assert that `fit` under a strategy gives the weights and losses of plain Keras.

    Both models begin with the same weights. Under a strategy with several workers, each worker must
    call this with the same data.

    Args:
        builder: creates the compiled model; called once, with fixed seeds.
        data: arrays (x, y) or (x, y, sample_weight), or a `tf.data.Dataset` of global batches.
        strategy: as of `tfd.create_strategy`.
        atol: the largest difference of a weight, an optimizer variable, or a loss or metric in the
            history; relative to the largest number of a variable where that is above 1.
        fit: more arguments of `fit`, such as batch_size (global) and epochs. Nothing is shuffled.

    Raises:
        AssertionError: with the variable or log that differs most, and by how much.
    """
    wanted, found, _ = train_both(builder, data, strategy, **fit)
    assert_close(found, wanted, atol)


def train_both(
    builder: Callable[[], keras.Model], data: Any, strategy: tf.distribute.Strategy, **fit: Any
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], DistributedModel]:
    """Train a model by Keras alone and under a strategy, as `assert_trains_like_one_device`.

    Returns:
        What `fit` leaves on one device and under the strategy (weights, optimizer variables and
        logs, by name), and the model of the strategy.
    """
    keras.utils.set_random_seed(_SEED)
    plain = builder()
    distributed = distribute(plain, strategy)
    arguments = data if isinstance(data, tuple) else (data,)
    x, y, weights = (*arguments, None, None)[:3]
    found = []
    for model, inner in ((plain, plain), (distributed, distributed.keras_model)):
        keras.utils.set_random_seed(_SEED)
        given = {"shuffle": False, "verbose": 0, "sample_weight": weights, **fit}
        history = model.fit(x, y, **given).history
        variables = [*inner.weights, *inner.optimizer.variables]
        found.append(
            {
                **{variable.path: variable.numpy() for variable in variables},
                **{f"{name} of fit": np.asarray(values) for name, values in history.items()},
            }
        )
    return found[0], found[1], distributed


def assert_close(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray], atol: float) -> None:
    """Assert that two trainings left the same numbers; names the one that differs most."""
    assert list(found) == list(wanted), f"there are {list(found)}, and not {list(wanted)}"
    worst, most = "", -1.0
    for name, value in wanted.items():
        right = np.asarray(value, "float64")
        apart = np.abs(np.asarray(found[name], "float64") - right)
        apart /= max(1.0, np.abs(right).max(initial=0.0))
        largest = float(np.nan_to_num(apart, nan=np.inf).max(initial=0.0))
        if largest > most:
            worst, most = name, largest
    if most > atol:
        raise AssertionError(
            f"not as on one device: {worst} must differ by at most {atol:.2g}, got {most:.2g}.\none"
            f" device: {wanted[worst]!r}\nstrategy: {found[worst]!r}"
        )


def _by_replica(value: Any, strategy: tf.distribute.Strategy) -> list[np.ndarray]:
    if strategy.extended._in_multi_worker_mode():
        row = strategy.run(lambda v: tf.convert_to_tensor(v)[tf.newaxis], args=(value,))
        return list(strategy.gather(row, axis=0).numpy())
    if isinstance(value, tf.distribute.DistributedValues):
        return [np.asarray(each) for each in strategy.experimental_local_results(value)]
    return [np.asarray(value)]
