"""Every loss, optimizer and metric as on one device, on parts of uneven size.

Three replicas and batches of 16: parts of 5, 5 and 6 rows; at the end of 50 rows two replicas
have one row and one has none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from training_cases import (
    RNG,
    X,
    Y,
    assert_same_history,
    assert_same_weights,
    assert_trains_as_keras,
    compiled,
    distributed_fit,
    mirrored,
    plain_fit,
    stack,
    weights_of,
)

ROWS = 50
FIT = {"batch_size": 16, "epochs": 3}
WEIGHTS = np.linspace(0.1, 3, ROWS).astype("float32")
WORDS = RNG.integers(1, 8, (ROWS, 4))
WORDS[np.arange(4) >= RNG.integers(1, 5, ROWS)[:, None]] = 0
NEXT = RNG.normal(size=(ROWS, 4, 1)).astype("float32")


def dense(optimizer: Callable[[], Any] = lambda: 0.1, **settings: Any) -> Callable:
    layers = keras.layers
    return lambda: compiled(
        stack(layers.Dense(4, "tanh"), layers.Dense(1, "sigmoid")),
        optimizer(),
        **{"metrics": ["mae"], **settings},
    )


def of_words(*between: keras.layers.Layer) -> keras.Model:
    """Sequences of up to 4 words in, some of them masked; a number for each word out."""
    embedding = keras.layers.Embedding(8, 3, mask_zero=True)
    layers = [keras.Input((4,), dtype="int32"), embedding, *between, keras.layers.Dense(1)]
    return keras.Sequential(layers)


def same(build: Callable, *data: Any, replicas: int = 3, **arguments: Any) -> tuple[Any, Any]:
    return assert_trains_as_keras(build, *data, strategy=mirrored(replicas), **{**FIT, **arguments})


@pytest.mark.parametrize("reduction", ["sum", "mean_with_sample_weight"])
def test_masks_with_sample_weights(reduction: str) -> None:
    def build() -> keras.Model:
        loss = keras.losses.MeanSquaredError(reduction=reduction)
        return compiled(of_words(), 0.01, loss, metrics=["mae"])

    weights = np.outer(WEIGHTS, [1, 2, 0.5, 0]).astype("float32")
    same(build, WORDS, NEXT, sample_weight=weights)


@pytest.mark.parametrize(
    "settings",
    [
        {"gradient_accumulation_steps": 2, "global_clipnorm": 0.05, "weight_decay": 0.1},
        {"use_ema": True, "ema_momentum": 0.7, "ema_overwrite_frequency": 3},
    ],
    ids=lambda settings: "+".join(settings),
)
def test_what_optimizers_do_beside_their_update(settings: dict[str, Any]) -> None:
    def optimizer() -> keras.optimizers.Optimizer:
        schedule = keras.optimizers.schedules.ExponentialDecay(0.2, 2, 0.9)
        return keras.optimizers.SGD(schedule, momentum=0.5, **settings)

    plain, ours = same(dense(optimizer), X[:ROWS], Y[:ROWS])
    for a, b in zip(plain.optimizer.variables, ours.keras_model.optimizer.variables, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), atol=1e-6, err_msg=a.path)


def test_constraints_and_frozen_layers() -> None:
    def build() -> keras.Model:
        model = dense()()
        model.layers[0].trainable = False
        model.layers[1].kernel.constraint = keras.constraints.MaxNorm(0.3)
        return model

    _, ours = same(build, X[:ROWS], Y[:ROWS])
    assert np.linalg.norm(ours.keras_model.layers[1].kernel.numpy()) < 0.3 + 1e-6


class Overflows(keras.layers.Layer):
    """Multiplies by the first column; one huge number there overflows in float16."""

    def call(self, x: Any) -> Any:
        return x * tf.cast(x[:, :1], x.dtype)


def test_an_overflow_on_one_replica_skips_the_step_on_all() -> None:
    def build() -> keras.Model:
        keras.config.set_dtype_policy("mixed_float16")
        try:
            model = stack(Overflows(), keras.layers.Dense(1, dtype="float32"))
        finally:
            keras.config.set_dtype_policy("float32")
        inner = keras.optimizers.SGD(0.01, momentum=0.9)
        return compiled(model, keras.optimizers.LossScaleOptimizer(inner, initial_scale=8.0))

    x = X[:48].copy()
    x[17, 0] = 60000.0  # in the second batch, on the first replica
    plain, _ = plain_fit(build, x, Y[:48], batch_size=16)
    ours, _ = distributed_fit(build, x, Y[:48], batch_size=16, strategy=mirrored(3))
    assert_same_weights(plain, ours, 1e-5)
    optimizer = ours.keras_model.optimizer
    assert int(optimizer.iterations.numpy()) == int(plain.optimizer.iterations.numpy()) == 2
    assert float(optimizer.dynamic_scale.numpy()) == 4.0
    assert all(np.isfinite(weight).all() for weight in weights_of(ours))


class LastSum(keras.metrics.Metric):
    """Declares how its states combine: one as a sum, one as a mean."""

    def __init__(self, name: str = "own", **arguments: Any):
        super().__init__(name=name, **arguments)
        self.rows = self.add_variable((), "zeros", name="rows")
        self.level = self.add_variable((), "zeros", aggregation="mean", name="level")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.rows.assign_add(tf.cast(tf.shape(y_true)[0], tf.float32))
        self.level.assign(tf.constant(5.0))

    def result(self) -> dict[str, Any]:
        return {"rows": self.rows, "level": self.level}  # variables, as Keras's guide returns them


def test_metrics_over_all_rows() -> None:
    metrics = [
        "accuracy",
        keras.metrics.AUC(num_thresholds=20),
        keras.metrics.BinaryIoU(name="iou"),  # as MeanIoU, from probabilities
        keras.metrics.F1Score(threshold=0.5),
        LastSum(),
    ]

    def build() -> keras.Model:
        made = [m if isinstance(m, str) else type(m).from_config(m.get_config()) for m in metrics]
        return dense(loss="binary_crossentropy", metrics=made)()

    plain, expected = plain_fit(build, X[:ROWS], Y[:ROWS], **FIT)
    ours, history = distributed_fit(build, X[:ROWS], Y[:ROWS], strategy=mirrored(3), **FIT)
    assert_same_weights(plain, ours)
    assert_same_history(dict(sorted(expected.items())), dict(sorted(history.items())))
    evaluated = ours.evaluate(X[:ROWS], Y[:ROWS], batch_size=16, verbose=0, return_dict=True)
    expected = plain.evaluate(X[:ROWS], Y[:ROWS], batch_size=16, verbose=0, return_dict=True)
    one_row = ours.evaluate(X[:1], Y[:1], verbose=0, return_dict=True)
    assert (one_row["rows"], one_row["level"]) == (1, 5)
    assert evaluated["rows"] == ROWS
    assert evaluated["level"] == 5
    for key, value in expected.items():
        np.testing.assert_allclose(evaluated[key], value, rtol=1e-5, err_msg=key)


def test_moving_statistics_are_means_over_the_rows() -> None:
    def build() -> keras.Model:
        layers = keras.layers.BatchNormalization(momentum=0.0), keras.layers.Dense(1)
        return compiled(stack(*layers), "sgd")

    parts = {"strategy": mirrored(3), "synchronize_batch_norm": False}
    ours, _ = distributed_fit(build, X[:16], Y[:16], batch_size=16, **parts)
    layer = ours.keras_model.layers[0]
    np.testing.assert_allclose(layer.moving_mean.numpy(), X[:16].mean(0), atol=1e-6)
    parts = [X[:5], X[5:10], X[10:16]]
    expected = sum(len(part) * part.var(0) for part in parts) / 16
    np.testing.assert_allclose(layer.moving_variance.numpy(), expected, atol=1e-6)


def test_synchronized_batch_normalization() -> None:
    """With a mask; without one: tests/exactness."""

    def build() -> keras.Model:
        normal = keras.layers.BatchNormalization(synchronized=True, momentum=0.5)
        return compiled(of_words(normal))

    same(build, WORDS, NEXT)
