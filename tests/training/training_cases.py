"""Small models and data for the tests of training, and Keras's own fit to compare with."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdist_ext as tfd

TOLERANCE = 1e-6
RNG = np.random.default_rng(0)
X = RNG.normal(size=(64, 5)).astype("float32")
Y = (X @ RNG.normal(size=(5, 1)) > 0).astype("float32")

_STRATEGIES: dict[tuple[str, int], tf.distribute.Strategy] = {}


def strategy_of(name: str, replicas: int = 2) -> tf.distribute.Strategy:
    """One strategy object for all tests: making a new one costs more than a step."""
    if (name, replicas) not in _STRATEGIES:
        options = {}
        if name in ("mirrored", "central_storage"):
            options = {"devices": [f"CPU:{i}" for i in range(replicas)]}
        _STRATEGIES[name, replicas] = tfd.create_strategy(name, **options)
    return _STRATEGIES[name, replicas]


def mirrored(replicas: int = 2) -> tf.distribute.Strategy:
    return strategy_of("mirrored", replicas)


def classifier(optimizer: str = "sgd", **compile_settings: Any) -> Callable[[], keras.Model]:
    """A builder: 5 numbers in, a probability out."""

    def build() -> keras.Model:
        model = stack(keras.layers.Dense(4, "tanh"), keras.layers.Dense(1, "sigmoid"))
        adam, sgd = keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.1, momentum=0.9)
        settings = {"loss": "binary_crossentropy", "metrics": ["accuracy"], **compile_settings}
        return compiled(model, adam if optimizer == "adam" else sgd, **settings)

    return build


def stack(*layers: Any) -> keras.Sequential:
    """A model of these layers: 5 numbers in."""
    return keras.Sequential([keras.Input((5,)), *layers])


def compiled(
    model: keras.Model, optimizer: Any = 0.05, loss: Any = "mse", **settings: Any
) -> keras.Model:
    """The model, compiled. A number in the place of the optimizer is a learning rate of SGD."""
    if isinstance(optimizer, float):
        optimizer = keras.optimizers.SGD(optimizer)
    model.compile(optimizer, loss, **settings)
    return model


class Net(keras.Model):
    """A subclass with two layers, and without a config."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = keras.layers.Dense(4, activation="tanh")
        self.last = keras.layers.Dense(1)

    def call(self, x: Any) -> Any:
        return self.last(self.hidden(x))


def small_model() -> keras.Model:
    """With the same weights each time, and its optimizer built."""
    keras.utils.set_random_seed(1)
    model = stack(keras.layers.Dense(4, "tanh"), keras.layers.Dense(1))
    compiled(model, keras.optimizers.Adam(0.02), metrics=["mae"])
    model.optimizer.build(model.trainable_variables)
    return model


CLASSIFIER = classifier()  # `distributed_fit` has one model of it for all tests


class Positions(keras.layers.Layer):
    """Adds a row of a table to each place of a sequence."""

    def build(self, shape: Any) -> None:
        self.table = keras.layers.Embedding(9, 4)

    def call(self, x: Any) -> Any:
        return x + self.table(keras.ops.arange(keras.ops.shape(x)[1]))


def of_words() -> keras.Model:
    """Sequences of up to 9 words, of 9 words in all, in; a number out."""
    words = keras.Input([None], dtype="int32")
    rows = keras.ops.tanh(Positions()(keras.layers.Embedding(9, 4)(words)))
    model = keras.Model(words, keras.layers.Dense(1)(keras.ops.mean(rows, axis=1)))
    model.compile(keras.optimizers.Adam(0.1), "mse", steps_per_execution=5)
    return model


def batches(rows: int = 64, batch: int = 16) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((X[:rows], Y[:rows])).batch(batch)


class Reshuffled(keras.utils.PyDataset):
    """Four batches of rows in an order that the end of each epoch changes."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.calls: list[str] = []
        self._random = np.random.default_rng(3)
        self._order = np.arange(64)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        self.calls.append(str(index))
        rows = self._order[index * 16 : index * 16 + 16]
        return X[rows], Y[rows]

    def on_epoch_begin(self) -> None:
        self.calls.append("begin")

    def on_epoch_end(self) -> None:
        self.calls.append("end")
        self._random.shuffle(self._order)


def of_unknown_length(dataset: tf.data.Dataset) -> tf.data.Dataset:
    return dataset.filter(lambda *_: True)


def plain_fit(
    build: Callable[[], keras.Model], *data: Any, eager: bool = True, **arguments: Any
) -> Any:
    """(model, history) of Keras's own fit, on one device.

    Eager, because few small steps take less time than making a graph of one.
    """
    keras.utils.set_random_seed(1)
    model = build()
    model.run_eagerly = eager
    return model, model.fit(*data, **{"verbose": 0, "shuffle": False, **arguments}).history


def distributed_fit(
    build: Callable[[], keras.Model],
    *data: Any,
    strategy: Any = None,
    synchronize_batch_norm: bool | None = None,
    one_trace: Any = "auto",
    **arguments: Any,
) -> Any:
    """(distributed model, history); on two mirrored replicas unless a strategy is given.

    CLASSIFIER has one model, reset by each call: the tests that share it compile its steps once.
    """
    keras.utils.set_random_seed(1)
    if build is CLASSIFIER and strategy is None:
        model = _shared_classifier()
    else:
        strategy = strategy or mirrored()
        parts = {"synchronize_batch_norm": synchronize_batch_norm, "one_trace": one_trace}
        model = tfd.distribute(build, strategy, **parts)
    return model, model.fit(*data, **{"verbose": 0, "shuffle": False, **arguments}).history


_SHARED: dict[str, Any] = {}


def _shared_classifier() -> Any:
    if not _SHARED:
        model = tfd.distribute(CLASSIFIER, mirrored())
        inner = model.keras_model
        _SHARED.update(model=model, start=inner.get_weights())
        _SHARED["rate"] = float(inner.optimizer.learning_rate)
    inner = _SHARED["model"].keras_model
    for weight, value in zip(inner.weights, _SHARED["start"], strict=True):
        weight.assign(value)
    for variable in inner.optimizer.variables:
        variable.assign(keras.ops.zeros(variable.shape, variable.dtype))
    inner.optimizer.learning_rate = _SHARED["rate"]
    return _SHARED["model"]


def weights_of(model: Any) -> list[np.ndarray]:
    model = getattr(model, "keras_model", model)
    return [variable.numpy() for variable in model.weights]


def copy_of_folder(folder: Path, copy: Path) -> None:
    """Copies a checkpoint folder while a background thread may write to it.

    The thread renames a file when it is complete. If a file vanishes between the listing and its
    copy, the copy starts again, so that the result is the folder at one moment.
    """
    for _ in range(20):
        try:
            shutil.copytree(folder, copy)
            return
        except shutil.Error:
            shutil.rmtree(copy)
    raise RuntimeError(f"{folder} changed during each of 20 attempts to copy it.")


def steps_taken(model: Any) -> int:
    return int(getattr(model, "keras_model", model).optimizer.iterations.numpy())


def assert_same_weights(one: Any, other: Any, tolerance: float = TOLERANCE) -> None:
    for a, b in zip(weights_of(one), weights_of(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance)


def assert_same_history(one: dict[str, list[float]], other: dict[str, list[float]]) -> None:
    assert list(one) == list(other)
    for name in one:
        np.testing.assert_allclose(one[name], other[name], rtol=1e-5, atol=2e-6, err_msg=name)


def assert_trains_as_keras(
    build: Callable[[], keras.Model],
    *data: Any,
    strategy: Any = None,
    eager: bool = True,
    **arguments: Any,
) -> tuple[Any, Any]:
    """(plain model, distributed model), equal in weights, steps and history."""
    plain, expected = plain_fit(build, *data, eager=eager, **arguments)
    ours, history = distributed_fit(build, *data, strategy=strategy, **arguments)
    assert_same_weights(plain, ours)
    assert_same_history(expected, history)
    return plain, ours


class KilledError(Exception):
    """Breaks a training off, as the end of its process would."""


class KillAfter(keras.callbacks.Callback):
    """Breaks the training off at the end of a step, counted from 1 over all epochs."""

    def __init__(self, steps: int):
        super().__init__()
        self.steps = steps

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.model.optimizer.iterations == self.steps:
            raise KilledError
