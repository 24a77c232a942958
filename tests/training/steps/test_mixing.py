"""Operations that mix rows of the batch are found in the graph of a step, and warned of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import pytest
import tensorflow as tf
from training_cases import X, Y, compiled, distributed_fit, mirrored, stack

import tfdist_ext as tfd
from tfdist_ext.training.steps.rows import EqualTensors, mixed_rows

ops = keras.ops


ORDER, PAIRS = "puts rows of the batch in another order", "compares rows of the batch"
STATISTIC, SELECTED = "relates values to a statistic", "takes the mean of selected rows"
MIXING: dict[str, tuple[Callable[[Any], Any], str | None]] = {
    "backwards": (lambda x: x[::-1], ORDER),
    "columns backwards": (lambda x: x[:, ::-1], None),
    "reverse": (lambda x: tf.reverse(x, [0]), ORDER),
    "flip": (lambda x: ops.flip(x, 1), None),
    "roll": (lambda x: ops.roll(x, 1, 0), ORDER),
    "roll of columns": (lambda x: tf.roll(x, 1, 1), None),
    "largest": (lambda x: tf.math.top_k(x[:, 0], 1)[0], ORDER),
    "largest columns": (lambda x: tf.math.top_k(x, 1)[0], None),
    "sorted": (lambda x: tf.sort(x, 0), ORDER),
    "sorted columns": (lambda x: tf.sort(x, 1), None),
    "ranks": (lambda x: tf.gather(x, tf.argsort(x[:, 0])), ORDER),
    "cumsum": (lambda x: ops.cumsum(x, 0), ORDER),
    "cumprod": (lambda x: tf.math.cumprod(x, 0), ORDER),
    "cumsum of columns": (lambda x: tf.cumsum(x, 1), None),
    "logsumexp": (lambda x: tf.math.cumulative_logsumexp(x, 0), ORDER),
    "shuffled": (tf.random.shuffle, ORDER),
    "shuffled columns": (lambda x: tf.transpose(tf.random.shuffle(tf.transpose(x))), None),
    "similarity": (lambda x: tf.matmul(x, x, transpose_b=True), PAIRS),
    "differences": (lambda x: x[:, None, 0] - x[None, :, 0], PAIRS),
    "product": (lambda x: tf.matmul(x, tf.ones([4, 3])), None),
    "standard deviation": (lambda x: tf.math.reduce_std(x, 0), STATISTIC),
    "of columns": (lambda x: tf.math.reduce_std(x, 1), None),
    "centered": (lambda x: x - tf.reduce_mean(x, 0), STATISTIC),
    "relative to the largest": (lambda x: x / tf.reduce_max(x), STATISTIC),
    "relative to a row": (lambda x: x * x[0], STATISTIC),
    "masked mean": (lambda x: tf.reduce_sum(x * x) / tf.reduce_sum(x), STATISTIC),
    "mean by hand": (lambda x: tf.reduce_sum(x) / tf.cast(tf.shape(x)[0], x.dtype), None),
    "root of a mean": (lambda x: tf.sqrt(tf.reduce_mean(x**2)), STATISTIC),
    "largest of all": (lambda x: tf.reduce_max(x, 0), STATISTIC),
    "largest of columns": (lambda x: tf.reduce_max(x, 1), None),
    "product of means": (lambda x: tf.reduce_mean(x) * tf.reduce_mean(x**2), STATISTIC),
    "sum of means": (lambda x: 0.3 * tf.reduce_mean(x) - tf.reduce_mean(x**2) / 4.0, None),
    "free bits": (lambda x: tf.maximum(tf.reduce_mean(x), 0.1), STATISTIC),
    "number of selected": (
        lambda x: tf.reduce_sum(x[x > 0]) / tf.cast(tf.size(x[x > 0]), x.dtype),
        STATISTIC,
    ),
    "squeezed": (lambda x: tf.reduce_mean(tf.square(tf.squeeze(x[:, :1]) - 1.0)), None),
    "mean plus rows": (lambda x: x + tf.reduce_mean(x), None),
    "scaled": (lambda x: x / 3.0 - tf.ones([4]), None),
    "mean of selected": (lambda x: tf.reduce_mean(tf.boolean_mask(x, x[:, 0] > 0)), SELECTED),
    "sum of selected": (lambda x: tf.reduce_sum(x[x > 0]), None),
}


@pytest.mark.parametrize("name", MIXING)
def test_operations_that_mix_rows(name: str) -> None:
    """Of a batch of (rows, 4) numbers."""
    function, expected = MIXING[name]
    found: Any = None

    def step(x: Any) -> None:
        nonlocal found
        found = mixed_rows([function(x)], EqualTensors(x), {}, {}, set())

    traced = tf.function(step, autograph=False)
    traced.get_concrete_function(tf.TensorSpec([None, 4], tf.float32))
    assert (found is None) == (expected is None)
    assert expected is None or found.startswith(expected)


def backwards() -> keras.Model:
    return compiled(stack(keras.layers.Lambda(lambda x: x + x[::-1]), keras.layers.Dense(1)))


def test_a_layer_that_mixes_rows_is_warned_of() -> None:
    with pytest.warns(UserWarning, match=r"another order, in .*2 replicas.*tfd\.all_rows\(x\)"):
        model, _ = distributed_fit(backwards, X[:16], Y[:16])
    with pytest.warns(UserWarning, match="another order"):
        model.predict(X[:16], verbose=0)


def root(y: Any, p: Any) -> Any:
    return tf.sqrt(keras.losses.MeanSquaredError()(y, p))


@pytest.mark.parametrize("settings", [{"loss": root}, {"metrics": [keras.losses.dice]}])
def test_a_loss_or_a_metric_that_is_no_mean_over_rows_is_warned_of(settings: Any) -> None:
    def build() -> keras.Model:
        return compiled(stack(keras.layers.Dense(1, "sigmoid")), **settings)

    with pytest.warns(UserWarning, match="relates values to a statistic"):
        distributed_fit(build, X[:16], Y[:16])


def test_predictions_that_are_no_rows_in_order_are_refused() -> None:
    blocks = keras.layers.Lambda(lambda x: ops.concatenate([x, -x], axis=0))
    model = tfd.distribute(stack(blocks), mirrored())
    with pytest.raises(tfd.TrainingError, match="one row for each row of the batch"):
        model.predict(X[:16], verbose=0)


def test_predictions_that_are_equal_on_all_replicas_are_those_of_one_device() -> None:
    inputs = keras.Input((5,))
    table = keras.layers.Lambda(lambda x: ops.ones((2, 3)))(inputs)
    model = keras.Model(inputs, {"rows": 2 * inputs, "table": table})
    ours = tfd.distribute(model, mirrored()).predict(X[:24], batch_size=16, verbose=0)
    assert {name: each.shape for name, each in ours.items()} == {"rows": (24, 5), "table": (4, 3)}
