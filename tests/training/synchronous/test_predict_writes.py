"""What layers write while a model predicts: every copy is written, with one device's values."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from training_cases import X, compiled, stack, strategy_of

import tfdist_ext as tfd


class MaskedDense(keras.layers.Dense):
    """A kernel with zeros that stay, as in causal and pruned layers."""

    def call(self, inputs: Any) -> Any:
        ones = keras.ops.ones_like(self.kernel)
        self.kernel.assign(0.9 * self.kernel * keras.ops.triu(ones))
        return super().call(inputs)


class Counts(keras.layers.Layer):
    """State of all kinds: an integer, a moving average, seeds, a metric."""

    def build(self, shape: Any) -> None:
        counter = {"shape": (), "initializer": "zeros", "trainable": False}
        self.calls = self.add_weight(dtype="int32", name="calls", **counter)
        self.average = self.add_weight(name="average", **counter)
        self.rows = keras.metrics.Sum(name="rows")
        self.dropout = keras.layers.Dropout(0.5, noise_shape=(1, shape[-1]), seed=3)

    def call(self, inputs: Any) -> Any:
        self.calls.assign_add(1)
        self.average.assign(0.5 * self.average + keras.ops.mean(inputs))
        self.rows.update_state(keras.ops.ones_like(inputs[:, 0]))
        return self.dropout(inputs, training=True)


class InTrainingMode(keras.layers.BatchNormalization):
    def call(self, inputs: Any, training: Any = None, mask: Any = None) -> Any:
        return super().call(inputs, training=True, mask=mask)


def build() -> keras.Model:
    keras.utils.set_random_seed(1)
    normal = InTrainingMode(synchronized=True)
    return compiled(stack(MaskedDense(4), Counts(), normal, keras.layers.Dense(1)))


def test_predict_writes_as_on_one_device() -> None:
    """Batches of 4, 4 and 1 rows: the last one leaves a replica without rows."""
    strategy = strategy_of("mirrored")
    plain, ours = build(), tfd.distribute(build, strategy)
    for _ in range(2):
        expected, got = (m.predict(X[:9], batch_size=4, verbose=0) for m in (plain, ours))
        np.testing.assert_allclose(got, expected, rtol=0, atol=2e-5)
    pairs = zip(ours.keras_model.variables, plain.variables, strict=True)
    for mine, theirs in pairs:
        np.testing.assert_allclose(
            mine.numpy(), theirs.numpy(), rtol=0, atol=2e-6, err_msg=mine.path
        )
        copies = strategy.experimental_local_results(mine.value)
        for copy in copies:
            np.testing.assert_array_equal(np.asarray(copy), mine.numpy(), err_msg=mine.path)
    counts = ours.keras_model.layers[1]
    assert int(counts.calls.numpy()) == 6
    assert float(counts.rows.result()) == 18
