"""Models whose class overrides `fit`, `evaluate` and other methods."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from training_cases import X, Y, assert_same_history, assert_same_weights, mirrored

import tfdist_ext as tfd


class Scaled(keras.Model):
    """Its methods multiply the data by 2 before Keras's get it, and train one epoch more."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x):
        return self.dense(x)

    def fit(self, x, y, epochs=1, batch_size=None, validation_data=None, **kwargs):
        before = self.evaluate(x, y, verbose=0)
        super().fit(2 * x, y, epochs=1, batch_size=batch_size, verbose=0, shuffle=False)
        if validation_data is not None:
            validation_data = (2 * validation_data[0], validation_data[1])
        kwargs["shuffle"] = False
        history = super().fit(
            2 * x, y, batch_size, epochs, validation_data=validation_data, **kwargs
        )
        history.history["before"] = before
        return history

    def evaluate(self, x=None, y=None, _use_cached_eval_dataset=False, **kwargs):
        if _use_cached_eval_dataset:  # Keras's fit, with the data that this class's has prepared
            logs = super().evaluate(x, y, _use_cached_eval_dataset=True, **kwargs)
            return {**logs, "twice": 2 * logs["loss"]}
        return super().evaluate(2 * x, y, **kwargs)

    def predict(self, x, **kwargs):
        return super().predict(2 * x, **kwargs) + 1

    def train_on_batch(self, x, y=None, **kwargs):
        return super().train_on_batch(2 * x, y, **kwargs)

    def score(self, x):
        return float(np.mean(self.predict(x, verbose=0)))


def scaled() -> keras.Model:
    model = Scaled()
    model.compile(keras.optimizers.SGD(0.01), "mse", metrics=["mae"], jit_compile=False)
    return model


class Asks(keras.callbacks.Callback):
    """Uses the model's own methods in the middle of a training."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[float] = []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.told += [*self.model.evaluate(X, Y, verbose=0), self.model.score(X[:3])]


def results_of(model: Any) -> dict[str, list[float]]:
    """What the methods of a `Scaled` return, and its history, by name."""
    asks = Asks()
    # Positional as this class takes them, not as keras.Model does: 2 epochs, batches of 16.
    history = model.fit(
        X, Y, 2, 16, validation_data=(X[:25], Y[:25]), verbose=0, callbacks=[asks]
    ).history
    results = {
        **history,
        "in callbacks": asks.told,
        "evaluate": model.evaluate(X, Y, verbose=0),
        "predict": model.predict(X[:3], verbose=0)[:, 0].tolist(),
        "score": [model.score(X)],
        "predict_on_batch": model.predict_on_batch(X[:3])[:, 0].tolist(),
    }
    # Keras before 3.15 adds the batch to what the metrics hold from before.
    metrics_of = getattr(model, "keras_model", model)
    metrics_of.reset_metrics()
    results["train_on_batch"] = model.train_on_batch(X[:7], Y[:7])
    metrics_of.reset_metrics()
    results["test_on_batch"] = model.test_on_batch(X, Y)
    return results


def test_methods_of_the_model_do_as_on_one_device() -> None:
    keras.utils.set_random_seed(1)
    plain = scaled()
    plain.run_eagerly = True
    expected = results_of(plain)
    keras.utils.set_random_seed(1)
    model = tfd.distribute(scaled, mirrored())
    assert_same_history(expected, results_of(model))
    assert_same_weights(plain, model)
    assert expected["val_twice"] == pytest.approx([2 * v for v in expected["val_loss"]])
    assert int(model.optimizer.iterations.numpy()) == 3 * 4 + 1
