"""Random numbers in steps are those of one device, whatever draws them.

Each replica has its rows of what one device draws for the global batch: to the bit, so single draws
are compared as outputs of `predict`, and layers by what is trained with them.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from training_cases import X, Y, assert_trains_as_keras, compiled, mirrored

import tfdist_ext as tfd

FIT = {"batch_size": 16, "epochs": 2}


class Draws(keras.layers.Layer):
    """Gives out one row of each draw for each row of the batch."""

    def __init__(self, **settings: Any):
        super().__init__(**settings)
        self.seed = keras.random.SeedGenerator(5)
        self.table = self.add_weight(shape=(16, 2), name="table")

    def call(self, x: Any) -> dict[str, Any]:
        ops, draw, rows = keras.ops, keras.random, keras.ops.shape(x)[0]
        own = {"seed": self.seed}
        rates = 0.5 + ops.abs(x[:, :1])
        both = ops.concatenate([x, ops.ones((rows, 5))], axis=0)
        blocks = draw.uniform(ops.shape(both), **own)
        tokens = ops.reshape(ops.repeat(x, 3, axis=1), (-1, 5))
        per_token = draw.normal((ops.shape(tokens)[0], 2), **own)
        words = ops.cast(ops.abs(10 * x), "int32")
        counted = tf.repeat(words, 2, axis=0)

        def drop(value: Any) -> Any:
            return draw.dropout(value, 0.5, **own)

        def by_row(value: Any, blocks: int) -> Any:
            return ops.transpose(ops.reshape(value, (blocks, -1, 5)), (1, 0, 2))

        return {
            "normal": draw.normal((rows, 3), mean=2.0, **own),
            "uniform": draw.uniform((rows,), 1.0, 3.0, **own),
            "aligned": draw.uniform((rows, 4, 2), **own),
            "truncated": draw.truncated_normal((rows, 5), **own),
            "integers": draw.randint((rows, 3), 0, 1000, **own),
            "bits": tf.random.stateless_uniform((rows, 3), [1, 2], None, None, tf.int32),
            "long": tf.random.stateless_uniform((rows, 3), [1, 2], 0, 9, tf.int64),
            "double": draw.normal((rows, 3), dtype="float64", **own),
            "half": draw.normal((rows, 3), dtype="float16", **own),
            "double, truncated": draw.truncated_normal((rows, 3), dtype="float64", **own),
            "gamma": draw.gamma((rows, 3), 0.7, **own),
            "gamma by column": draw.gamma((rows, 3), ops.array([0.5, 1.0, 2.0]), **own),
            "gamma by row": draw.gamma((rows, 3), ops.tile(rates, (1, 3)), **own),
            "beta": draw.beta((rows,), 0.8, 0.4, **own),
            "binomial": draw.binomial((rows, 2), 10.0, 0.3, **own),
            "poisson": tf.random.stateless_poisson((rows, 2), [1, 2], [3.0, 4.0]),
            "categories": draw.categorical(ops.log(ops.abs(x)), 4, **own),
            "dropout": draw.dropout(ops.ones_like(x), 0.5, **own),
            "dropout of columns": draw.dropout(ops.ones((rows, 3, 2)), 0.5, (rows, 1, 2), **own),
            "no seed": draw.normal((rows, 2)),
            "first block": blocks[:rows],
            "second block": blocks[rows:],
            "tokens": ops.reshape(per_token, (rows, 3, 2)),
            "as many words": draw.uniform(ops.shape(counted), **own)[::2],
            "like a weight": x[:, :1] + ops.sum(self.table + draw.normal((16, 2), **own)),
            "columns": x + draw.normal((5,), **own),
            "a row for all": x + draw.normal((1, 5), **own),
            "a number": x + draw.normal((), **own),
            "shuffled": draw.shuffle(x, **own),
            "mixed": ops.take(x, draw.shuffle(ops.arange(rows), **own), axis=0),
            "gathered": tf.gather(x, draw.shuffle(ops.arange(rows), **own)),
            "columns shuffled": draw.shuffle(x, axis=1, **own),
            "samples first": ops.transpose(draw.normal((3, rows, 2), **own), (1, 0, 2)),
            "rows last": ops.transpose(draw.uniform((4, rows), **own)),
            "tiled": by_row(drop(ops.tile(x, (4, 1))), 4),
            "stacked": by_row(drop(ops.stack([x, x])), 2),
            "time first": ops.transpose(drop(ops.transpose(x))),
            "repeated": ops.reshape(drop(ops.repeat(x, 4, axis=0)), (-1, 4, 5)),
            "selected": tf.tensor_scatter_nd_update(x, tf.where(x > 0), drop(x[x > 0])),
        }


def drawing(layer: type[keras.layers.Layer] = Draws) -> keras.Model:
    """Not compiled: Keras would let XLA draw, which has other numbers."""
    keras.utils.set_random_seed(3)
    inputs = keras.Input((5,))
    return keras.Model(inputs, layer()(inputs))


def drawn_on(replicas: int, layer: type[keras.layers.Layer], *rows: int) -> list[Any]:
    """All that the layer draws for each number of rows, in batches of 16."""
    model = drawing(layer)
    if replicas:
        model = tfd.distribute(lambda: drawing(layer), mirrored(replicas))
    return [model.predict(X[:count], batch_size=16, verbose=0) for count in rows]


def test_each_replica_draws_its_rows_of_what_one_device_draws() -> None:
    """Also where the last batch leaves a replica without rows, and another one with one row."""
    drawn = drawn_on(3, Draws, 41, 34), drawn_on(0, Draws, 41, 34)
    for ours, one_device in zip(*drawn, strict=True):
        assert_same(ours, one_device)


def assert_same(ours: dict[str, Any], one_device: dict[str, Any]) -> None:
    assert ours.keys() == one_device.keys()
    for name, values in one_device.items():
        np.testing.assert_allclose(ours[name], values, 1e-6, 1e-6, err_msg=name)


class OfABatch(keras.layers.Layer):
    """Noise for 16 rows, the size of the global batch written as a number."""

    def __init__(self, draw: Any) -> None:
        super().__init__()
        self.draw = draw

    def call(self, x: Any) -> Any:
        return x + self.draw((16, 5))


@pytest.mark.parametrize(
    ("draw", "as_dataset"), [(keras.random.normal, False), (tf.random.normal, True)]
)
def test_the_rows_of_the_global_batch_as_a_number(draw: Any, as_dataset: bool) -> None:
    def build() -> keras.Model:
        return compiled(keras.Sequential([OfABatch(draw), keras.layers.Dense(1)]))

    model = tfd.distribute(build, mirrored())
    data: dict[str, Any] = {"x": X, "y": Y, "batch_size": 16}
    if as_dataset:
        data = {"x": tf.data.Dataset.from_tensor_slices((X, Y)).batch(16).prefetch(1)}
    with pytest.raises(tfd.TrainingError, match=r"shape \(16, 5\), .*keras\.ops\.shape\(x\)"):
        model.fit(**data, verbose=0)


class WithPositions(keras.layers.Layer):
    """One noise for all rows, of sequences as long as they come."""

    def call(self, x: Any) -> Any:
        steps = keras.ops.shape(x)[1]
        return x + keras.random.normal((steps, 1)) + keras.random.uniform((1, steps, 1))


def layers_that_draw() -> keras.Model:
    layers = keras.layers
    inputs = keras.Input((None, 5))
    x = WithPositions()(layers.SpatialDropout1D(0.3)(inputs))
    x = layers.LSTM(4, dropout=0.2, recurrent_dropout=0.3, return_sequences=True)(x)
    x = layers.GaussianNoise(0.2)(layers.GaussianDropout(0.2)(x))
    x = layers.AlphaDropout(0.2)(layers.TimeDistributed(layers.Dropout(0.2))(x))
    outputs = layers.Dense(1)(layers.GlobalAveragePooling1D()(x))
    return compiled(keras.Model(inputs, outputs), keras.optimizers.SGD(0.1, momentum=0.9))


def mixing() -> keras.Model:
    layers = keras.layers
    inputs = keras.Input((5, 5, 1))
    x = layers.CutMix(factor=(1.0, 3.0))(layers.MixUp(alpha=1.0)(inputs))
    return compiled(keras.Model(inputs, layers.Dense(1)(layers.Flatten()(x))), 0.01)


@pytest.mark.parametrize("build", [layers_that_draw, mixing])
def test_layers_train_as_on_one_device(build: Any) -> None:
    images = np.random.default_rng(1).normal(size=(41, 5, 5, 1)).astype("float32")
    x = images if build is mixing else images[..., 0]
    assert_trains_as_keras(build, x, Y[:41], **FIT)


class WithState(keras.layers.Layer):
    def call(self, x: Any) -> Any:
        shape = keras.ops.shape(x)
        whole = tf.random.uniform([shape[0], 2], maxval=10**6, dtype=tf.int32)
        drawn = {"normal": tf.random.normal(shape), "whole": whole}
        drawn["uniform"] = tf.random.uniform([shape[0]])
        drawn["truncated"] = tf.random.truncated_normal([shape[0], 3])
        return {**drawn, "a number": x[:, :1] * 0 + tf.random.normal([])}


def test_operations_that_keep_a_state_draw_each_row() -> None:
    """`tf.random.normal` after `set_random_seed`, from replicas that share a trace."""
    (drawn,) = drawn_on(2, WithState, 64)
    for name, values in drawn.items():
        assert len(np.unique(values, axis=0)) == (4 if name == "a number" else 64), name


def test_what_is_drawn_without_a_seed_goes_on_as_in_keras() -> None:
    def noise(model: Any) -> list[Any]:
        found = [model.predict(X[:9], batch_size=4, verbose=0) for _ in range(2)]
        found.append(keras.random.normal((3,)).numpy())  # by the user, between
        return [*found, model.predict(X[:9], batch_size=4, verbose=0)]

    class Noise(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            return x + keras.random.normal(keras.ops.shape(x))

    expected = noise(drawing(Noise))
    found = noise(tfd.distribute(lambda: drawing(Noise), mirrored()))
    for ours, one_device in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, one_device)


def test_the_copy_of_a_model_draws_what_the_model_would_have_drawn() -> None:
    def trained(distribute: bool) -> list[Any]:
        keras.utils.set_random_seed(4)
        layers = keras.layers.Dropout(0.5), keras.layers.Dense(1)
        model = compiled(keras.Sequential(layers), "sgd")
        fit = {"batch_size": 16, "shuffle": False, "verbose": 0}
        model.fit(X[:41], Y[:41], **fit)
        ours: Any = tfd.distribute(model, mirrored()) if distribute else model
        ours.fit(X[:41], Y[:41], **fit)
        return ours.get_weights()

    for ours, one_device in zip(trained(True), trained(False), strict=True):
        np.testing.assert_allclose(ours, one_device, rtol=1e-5, atol=1e-6)
