"""Sparse gradients under optimizers with second moments, which square the slices one by one.

Of positions and other constant indices one device has one slice each; of the batch's rows as many
as there are rows. Batches of 10 on three replicas are parts of 3, 3 and 4 rows, the last of 26 rows
parts of 2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from training_cases import RNG, compiled, mirrored, plain_fit, strategy_of, weights_of

import tfdist_ext as tfd

LENGTH = 4
TOKENS = RNG.integers(0, 7, (26, LENGTH))
Y = RNG.normal(size=(26, 1)).astype("float32")


class Lookups(keras.layers.Layer):
    """A table for each way to look up rows, of the batch or not."""

    RELATIVE = np.abs(np.arange(LENGTH)[:, None] - np.arange(LENGTH)[None])

    def build(self, shape: Any) -> None:
        names = ["length", "constant", "both", "types", "tiled", "random", "fixed"]
        self.tables = {
            name: self.add_weight(shape=(8, 3), name=name, initializer="random_normal")
            for name in names
        }
        self.seed = keras.random.SeedGenerator(7)

    def call(self, x: Any) -> Any:
        ops, tables = keras.ops, self.tables
        rows, length = ops.shape(x)
        positions = ops.arange(length)
        found = [
            tf.gather(tables["length"], positions),
            tf.reduce_sum(tf.gather(tables["constant"], self.RELATIVE), axis=1),
            ops.take(tables["both"], x, axis=0) + ops.take(tables["both"], positions, axis=0),
            ops.take(tables["types"], ops.zeros_like(x), axis=0),
            ops.take(tables["tiled"], ops.tile(positions[None], (rows, 1)), axis=0),
            tf.gather(tables["random"], keras.random.randint((4,), 0, 8, seed=self.seed)),
            ops.take(tables["fixed"], np.array([0, 5, 5, 1]), axis=0),
        ]
        summed = ops.zeros((1, 1, 3))
        for rows in found:
            summed = ops.tanh(summed + rows)
        return ops.mean(summed, axis=1)


def with_adam(model: keras.Model) -> keras.Model:
    return compiled(model, keras.optimizers.Adam(0.05))


def lookups(kind: Any = keras.Model) -> keras.Model:
    tokens = keras.Input((None,), dtype="int32")
    return with_adam(kind(tokens, keras.layers.Dense(1)(Lookups()(tokens))))


def assert_same_tables(build: Callable, strategy: Any, data: Any = None, **arguments: Any) -> None:
    plain, _ = plain_fit(build, *(data or (TOKENS, Y)), **arguments)
    keras.utils.set_random_seed(1)
    ours = tfd.distribute(build, strategy)
    ours.fit(*(data or (TOKENS, Y)), shuffle=False, verbose=0, **arguments)
    for variable, one, other in zip(
        plain.weights, weights_of(plain), weights_of(ours), strict=True
    ):
        np.testing.assert_allclose(other, one, rtol=0, atol=1e-5, err_msg=variable.path)


FIT = {"batch_size": 10, "epochs": 2}


def test_every_way_to_look_up_rows() -> None:
    assert_same_tables(lookups, mirrored(3), **FIT)


class Clipping(keras.Model):
    """A step that clips by hand; the gradients of tables are slices."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        gradients, norm = tf.clip_by_global_norm(gradients, 0.05)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"norm": norm}


def test_a_step_that_clips_slices_by_hand() -> None:
    assert_same_tables(lambda: lookups(Clipping), mirrored(2), **FIT)


def test_token_types_of_batches_of_one_size() -> None:
    """`zeros_like` of ids of a known shape is no constant: there is one for each row."""

    def build() -> keras.Model:
        tokens = keras.Input((LENGTH,), dtype="int32")
        types = keras.layers.Embedding(2, 3)(keras.ops.zeros_like(tokens))
        rows = keras.ops.tanh(keras.layers.Embedding(8, 3)(tokens) + types)
        return with_adam(keras.Model(tokens, keras.layers.Dense(1)(keras.ops.mean(rows, axis=1))))

    data = tf.data.Dataset.from_tensor_slices((TOKENS, Y)).batch(8, drop_remainder=True)
    assert_same_tables(build, mirrored(2), (data,), epochs=2)


def test_a_dense_layer_on_sparse_inputs() -> None:
    """Keras looks up each distinct column once, in the rows of a batch: so here, in all parts."""

    def build() -> keras.Model:
        inputs = keras.Input((9,), sparse=True)
        return with_adam(keras.Model(inputs, keras.layers.Dense(2)(inputs)))

    x = RNG.normal(size=(26, 9)).astype("float32") * (RNG.random((26, 9)) < 0.3)
    assert_same_tables(build, mirrored(3), (tf.sparse.from_dense(x), Y), **FIT)


def test_sparse_ids() -> None:
    def build() -> keras.Model:
        ids = keras.Input((LENGTH,), dtype="int32", sparse=True)
        rows = keras.ops.sum(keras.layers.Embedding(8, 3)(ids), axis=1)
        return with_adam(keras.Model(ids, keras.layers.Dense(1)(rows)))

    ids = tf.sparse.from_dense(TOKENS.astype("int32"))
    assert_same_tables(build, strategy_of("central_storage", 3), (ids, Y), **FIT)
