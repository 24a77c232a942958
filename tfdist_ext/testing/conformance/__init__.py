"""Tests for custom strategies: subclass StrategyConformance and return a strategy.

    class TestMyStrategy(StrategyConformance):
        def strategy(self):
            return MyStrategy(devices=3)

Each check is a method that pytest collects. It can also be called directly. A check that fails
raises an AssertionError with the expected and the actual value. This module checks training, with
assertions that are useful for other tests, too. The other modules check the methods of a strategy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist_ext.testing.conformance.replica_checks import ReplicaChecks
from tfdist_ext.testing.conformance.variable_checks import VariableChecks
from tfdist_ext.training.verify import TOLERANCE, Trainings
from tfdist_ext.user_frames import filter_traceback

__all__ = [
    "StrategyConformance",
    "assert_same_on_all_replicas",
    "assert_trains_like_one_device",
]


@filter_traceback
def assert_same_on_all_replicas(
    value: Any, *, strategy: tf.distribute.Strategy | None = None, atol: float = 0.0
) -> None:
    """Asserts that every replica has the same value. NaN equals NaN.

    Args:
        value: a result of `strategy.run`, a variable, or a structure of them.
        strategy: the strategy of the value. By default, the strategy of the current scope. With
            several workers, pass the strategy, and make this call on all workers.
        atol: the largest allowed difference.

    Raises:
        AssertionError: the values differ. The message contains a replica and its value.
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
    tolerance: float = TOLERANCE,
    **options: Any,
) -> None:
    """Asserts that a model trains on a strategy as it does on one device, with `tfd.verify`.

    Args:
        builder: the argument of `tfd.verify`.
        data: the argument of `tfd.verify`.
        strategy: the argument of `tfd.verify`. It may have one replica.
        tolerance: the argument of `tfd.verify`.
        options: other arguments of `tfd.verify`, such as steps, batch_size (global) and epochs.

    Raises:
        AssertionError: the results differ. The message is the table of `tfd.verify`.
    """
    result = Trainings(builder, data, **options).compare(strategy, tolerance)
    if not result.equal:
        raise AssertionError(str(result))


def _by_replica(value: Any, strategy: tf.distribute.Strategy) -> list[np.ndarray]:
    if strategy.extended._in_multi_worker_mode():
        row = strategy.run(lambda v: tf.convert_to_tensor(v)[tf.newaxis], args=(value,))
        return list(strategy.gather(row, axis=0).numpy())
    if isinstance(value, tf.distribute.DistributedValues):
        return [np.asarray(local) for local in strategy.experimental_local_results(value)]
    return [np.asarray(value)]


ROWS, BATCH, CLASSES = 37, 12, 3  # one row is left for all replicas in the last batch

_RNG = np.random.default_rng(0)
NUMBERS = _RNG.normal(size=(ROWS, 5)).astype("float32")
IDS = _RNG.integers(0, 12, (ROWS, 3))
LABELS = _RNG.integers(0, CLASSES, ROWS)
WEIGHTS = np.linspace(0.1, 2, ROWS)  # with these, a mean of means is not the mean of the rows


def _build() -> keras.Model:
    """An embedding (its gradients are slices), BatchNormalization and regularization.

    The optimizer clips by the norm of the whole gradient, and averages the weights.
    """
    layers = keras.layers
    numbers, ids = keras.Input([5]), keras.Input([3], dtype="int32")
    rows = layers.Flatten()(layers.Embedding(12, 4)(ids))
    regularizer = keras.regularizers.L2(0.05)
    hidden = layers.Concatenate()([numbers, rows])
    # BatchNormalization would leave a bias hardly any gradient but rounding.
    hidden = layers.Dense(8, "tanh", use_bias=False, kernel_regularizer=regularizer)(hidden)
    hidden = layers.BatchNormalization(synchronized=True, momentum=0.8)(hidden)
    model = keras.Model([numbers, ids], layers.Dense(CLASSES)(hidden))
    optimizer = keras.optimizers.AdamW(
        0.01,
        weight_decay=0.1,
        global_clipnorm=0.3,
        use_ema=True,
        ema_momentum=0.8,
        ema_overwrite_frequency=3,
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, weighted_metrics=["accuracy"])
    model.optimizer.build(model.trainable_variables)
    return model


class StrategyConformance(VariableChecks, ReplicaChecks):
    """Tests of a synchronous strategy on the devices of one machine.

    A subclass defines `strategy()`. To skip a check, set it to None (`test_gather = None`). To
    expect a failure, override the check and mark it with `pytest.mark.xfail`.

    Attributes:
        tolerance: the largest difference between a training on the strategy and on one device. The
            default is 1e-6.
    """

    def test_trains_like_one_device(self) -> None:
        """Weights, optimizer, losses and metrics, with sample weights and uneven batches."""
        models: list[keras.Model] = []

        def build() -> keras.Model:
            model = _build()
            if tf.distribute.has_strategy():
                models.append(model)
            return model

        data, strategy = ([NUMBERS, IDS], LABELS, WEIGHTS), self.under_test()
        fit: dict[str, Any] = {"batch_size": BATCH, "epochs": 2, "steps": -(-ROWS // BATCH)}
        fit |= {"validation_data": data, "validation_batch_size": BATCH}
        verification = Trainings(build, data, **fit).compare(strategy, self.tolerance)
        # The tolerance is the only limit: rounding does not explain a larger difference.
        verification = replace(verification, rounding={})
        if not verification.equal:
            raise AssertionError(str(verification))
        assert_same_on_all_replicas(
            [weight.value for weight in models[-1].weights], strategy=strategy
        )
