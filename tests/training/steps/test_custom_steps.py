"""Steps, losses and metrics of the user's own; eager steps and XLA."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from event_files import scalars
from training_cases import (
    Net,
    X,
    Y,
    assert_trains_as_keras,
    batches,
    classifier,
    compiled,
    mirrored,
    of_unknown_length,
)

import tfdist_ext as tfd

FIT = {"batch_size": 16, "epochs": 2}


def replicas() -> int:
    return tf.distribute.get_strategy().num_replicas_in_sync


class OwnSteps(Net):
    def __init__(self):
        super().__init__()
        self.tracker = keras.metrics.Mean(name="mine")
        self.weighted = keras.metrics.Mean(name="weighted"), keras.metrics.Sum(name="sum")

    @property
    def metrics(self):
        return [self.tracker, *self.weighted]

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((y - self(x, training=True)) ** 2)
            scaled = loss / replicas()
        gradients = tape.gradient(scaled, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        self.tracker.update_state(loss)
        for metric in self.weighted:
            metric.update_state(loss, sample_weight=2.0)
        return {"last": loss, **{metric.name: metric.result() for metric in self.metrics}}

    def test_step(self, data):
        x, y = data
        loss = tf.reduce_mean((y - self(x)) ** 2)
        self.tracker.update_state(loss, sample_weight=tf.shape(x)[0])
        return {"mine": self.tracker.result()}

    def predict_step(self, data):
        x = data[0] if isinstance(data, tuple) else data
        return {"twice": self(x) * 2, "first": x[:, :1]}


def test_own_steps_are_used() -> None:
    rows = X[:49], Y[:49]  # the last batch has one row
    plain, ours = assert_trains_as_keras(lambda: compiled(OwnSteps(), "adam"), *rows, **FIT)
    # Own test_step: every row once, at an uneven end too.
    assert ours.evaluate(X[:61], Y[:61], batch_size=16, verbose=0) == pytest.approx(
        plain.evaluate(X[:61], Y[:61], batch_size=16, verbose=0), rel=1e-5
    )
    predicted = ours.predict(X[:7], batch_size=3, verbose=0)
    assert list(predicted) == ["twice", "first"]
    np.testing.assert_array_equal(predicted["first"], X[:7, :1])
    np.testing.assert_allclose(predicted["twice"], 2 * np.asarray(plain(X[:7])), atol=1e-6)


def test_a_strategy_with_the_default_cross_device_ops() -> None:
    own = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    assert_trains_as_keras(classifier(), X, Y, strategy=own, **FIT)


def test_summaries_of_a_step_have_the_tags_of_the_user(tmp_path: Path) -> None:
    """And the values of the first replica's rows, the first half of each batch of 16."""

    class Summarized(Net):
        def call(self, x: Any) -> Any:
            tf.summary.scalar("first", tf.reduce_mean(x[:, 0]), step=self.optimizer.iterations)
            return super().call(x)

        def test_step(self, data: Any) -> Any:
            with tf.name_scope("tested"):
                tf.summary.scalar("second", tf.reduce_mean(data[0][:, 1]), step=9)
            return super().test_step(data)

    model = tfd.distribute(lambda: compiled(Summarized(), steps_per_execution=2), mirrored())
    data = of_unknown_length(batches())
    with tf.summary.create_file_writer(str(tmp_path)).as_default():
        model.fit(data, verbose=0)
        model.evaluate(data.take(1), verbose=0)
    found = {tag: list(steps.items()) for tag, steps in scalars(tmp_path).items()}
    (in_call,) = {tag for tag in found if tag.endswith("first")}
    assert in_call.startswith("summarized")
    assert found.pop("tested/second") == [(9, pytest.approx(X[:8, 1].mean(), rel=1e-5))]
    means = [X[begin : begin + 8, 0].mean() for begin in range(0, 64, 16)]
    # The step of evaluate has the number of the one that fit would do next.
    steps = [*enumerate(means), (4, means[0])]
    assert found.pop(in_call) == [(step, pytest.approx(mean, rel=1e-5)) for step, mean in steps]
    assert not found


@pytest.mark.filterwarnings("ignore:The step relates values")
@pytest.mark.parametrize(
    "fixed",
    [
        lambda x: x * tf.ones([x.shape[0], 1]),
        lambda x: tf.reshape(x, [16, 5]),
    ],
)
def test_a_fixed_number_of_rows_is_named_as_the_cause(fixed: Any) -> None:
    class Fixed(Net):
        def call(self, x: Any) -> Any:
            return super().call(fixed(x))

    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(16, drop_remainder=True)
    model = tfd.distribute(lambda: compiled(Fixed()), mirrored())
    with pytest.raises((TypeError, ValueError, tf.errors.InvalidArgumentError)) as caught:
        model.fit(data, verbose=0)
    assert "write keras.ops.shape(x)[0]" in caught.value.__notes__[-1]


def gathers(model: keras.Model, data: Any) -> Any:
    return tf.reduce_mean(tfd.all_rows(data[0]))


def applies(model: keras.Model, data: Any) -> Any:
    x, y = data
    with tf.GradientTape() as tape:
        loss = model.compute_loss(y=y, y_pred=model(x, training=True))
    gradients = tape.gradient(loss, model.trainable_variables)
    model.optimizer.apply(gradients, model.trainable_variables)
    return loss


@pytest.mark.parametrize("call", [gathers, applies])
def test_a_sum_over_replicas_in_a_function_of_the_user_is_refused(call: Any) -> None:
    class Nested(Net):
        def train_step(self, data: Any) -> Any:
            return {"own": tf.function(lambda data: call(self, data))(data)}

    with pytest.raises(tfd.TrainingError, match=r"sum over replicas is inside a tf\.function"):
        tfd.distribute(lambda: compiled(Nested()), mirrored()).fit(X, Y, verbose=0)


def test_a_model_that_only_trains_is_built() -> None:
    """Keras's RandomCrop has another output size in a test than Flatten expects."""

    def build() -> keras.Model:
        layers = [keras.layers.RandomCrop(4, 4, seed=1), keras.layers.Flatten()]
        return compiled(keras.Sequential([keras.Input((6, 6, 1)), *layers, keras.layers.Dense(1)]))

    images = np.random.default_rng(1).normal(size=(20, 6, 6, 1)).astype("float32")
    assert_trains_as_keras(build, images, Y[:20], **FIT)


def test_xla_of_a_function_that_is_a_step_is_named() -> None:
    class Compiled(Net):
        @tf.function(jit_compile=True)
        def train_step(self, data: Any) -> Any:
            return super().train_step(data)

    with pytest.warns(UserWarning, match=r"jit_compile=True of the tf\.function train_step"):
        tfd.distribute(lambda: compiled(Compiled()), mirrored()).fit(X, Y, verbose=0)
