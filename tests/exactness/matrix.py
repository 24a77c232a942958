"""The cells of the exactness matrix: models, optimizers, and rows cut in batches.

Each cell is a training of several epochs that is to give the same weights, losses and metrics on
every synchronous strategy as on one device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import keras
import numpy as np

EPOCHS = 3
CLASSES = 3

# name -> (rows, global batch)
SIZES = {
    "even": (48, 12),
    "uneven": (41, 12),
    "few": (7, 2),  # fewer rows in a batch than there are replicas, on 3 and 4
    "one row": (1, 12),
}

OPTIMIZERS: dict[str, Callable[[], keras.optimizers.Optimizer]] = {
    "SGD, momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "Adam": lambda: keras.optimizers.Adam(0.01),
    "AdamW, clipped, EMA": lambda: keras.optimizers.AdamW(
        0.01,
        weight_decay=0.1,
        global_clipnorm=0.3,
        use_ema=True,
        ema_momentum=0.8,
        ema_overwrite_frequency=3,
    ),
}


class Data(NamedTuple):
    """What `fit` is given, by position and by name."""

    x: Any
    y: Any
    sample_weight: Any = None

    def first(self, rows: int) -> Data:
        return Data(
            *keras.tree.map_structure(lambda part: None if part is None else part[:rows], self)
        )


def _numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(keras.config.floatx())


def _classes(*shape: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, CLASSES, shape)


def _logits_loss(**arguments: Any) -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **arguments)


def mlp() -> tuple[keras.Model, dict[str, Any], Data]:
    """Regularized, with weights of samples."""
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8, activation="tanh", kernel_regularizer=keras.regularizers.L2(0.05)),
            layers.Dense(CLASSES, activity_regularizer=keras.regularizers.L2(0.01)),
        ]
    )
    data = Data(_numbers(48, 6), _classes(48), np.linspace(0.1, 2, 48))
    settings = {"loss": _logits_loss(), "weighted_metrics": ["accuracy"]}
    return model, settings, data


def cnn_with_batch_normalization() -> tuple[keras.Model, dict[str, Any], Data]:
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((5, 5, 2)),
            layers.Conv2D(4, 3, use_bias=False),  # BatchNormalization takes it out again
            layers.BatchNormalization(synchronized=True, momentum=0.8),
            layers.Activation("tanh"),
            layers.Flatten(),
            layers.Dense(CLASSES),
        ]
    )
    settings = {"loss": _logits_loss(), "metrics": ["accuracy"]}
    return model, settings, Data(_numbers(48, 5, 5, 2), _classes(48))


def embedding_and_lstm_with_mask() -> tuple[keras.Model, dict[str, Any], Data]:
    """Sequences of different lengths: the loss is the mean over the steps that are there."""
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((4,), dtype="int32"),
            layers.Embedding(9, 3, mask_zero=True),
            layers.LSTM(3, return_sequences=True),
            layers.Dense(CLASSES),
        ]
    )
    words = np.random.default_rng(2).integers(1, 9, (48, 4))
    lengths = np.random.default_rng(3).integers(1, 5, 48)
    words[np.arange(4) >= lengths[:, None]] = 0
    settings = {"loss": _logits_loss(), "metrics": ["accuracy"]}
    return model, settings, Data(words, _classes(48, 4))


def two_outputs() -> tuple[keras.Model, dict[str, Any], Data]:
    """A mean and a sum as losses, with weights."""
    layers = keras.layers
    inputs = keras.Input((6,))
    hidden = layers.Dense(8, activation="tanh")(inputs)
    outputs = {
        "kind": layers.Dense(CLASSES, name="kind")(hidden),
        "size": layers.Dense(2, name="size")(hidden),
    }
    model = keras.Model(inputs, outputs)
    settings = {
        "loss": {"kind": _logits_loss(), "size": keras.losses.MeanSquaredError(reduction="sum")},
        "loss_weights": {"kind": 1.0, "size": 0.02},
        "metrics": {"kind": ["accuracy"], "size": ["mae"]},
    }
    return model, settings, Data(_numbers(48, 6), {"kind": _classes(48), "size": _numbers(48, 2)})


@keras.saving.register_keras_serializable("exactness")
class OwnStep(keras.Model):
    """Subclassed, with a loss of its own beside the compiled one and its own train_step."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = keras.layers.Dense(8, activation="tanh")
        self.head = keras.layers.Dense(CLASSES)

    def call(self, inputs: Any) -> Any:
        hidden = self.hidden(inputs)
        self.add_loss(0.1 * keras.ops.mean(keras.ops.square(hidden)))
        return self.head(hidden)

    def train_step(self, data: Any) -> dict[str, Any]:
        import tensorflow as tf

        x, y = data
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = self.compute_loss(x=x, y=y, y_pred=predicted)
            loss = loss + 0.05 * tf.reduce_mean(tf.abs(predicted))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, predicted)
        return {metric.name: metric.result() for metric in self.metrics}


def own_train_step() -> tuple[keras.Model, dict[str, Any], Data]:
    model = OwnStep()
    model(_numbers(1, 6))
    settings = {"loss": _logits_loss(), "metrics": ["accuracy"]}
    return model, settings, Data(_numbers(48, 6), _classes(48))


def transformer_with_dropout() -> tuple[keras.Model, dict[str, Any], Data]:
    layers = keras.layers
    words = keras.Input((4,), dtype="int32")
    x = layers.Embedding(9, 6)(words)
    # The gradient of a bias of keys is 0 but for rounding, which Adam makes as large as any other.
    attention = layers.MultiHeadAttention(2, 3, dropout=0.3, use_bias=False)
    x += layers.Dropout(0.2)(attention(x, x))
    x = layers.LayerNormalization()(x)
    x += layers.Dropout(0.2)(layers.Dense(6)(layers.Dense(8, activation="tanh")(x)))
    outputs = layers.Dense(CLASSES)(layers.GlobalAveragePooling1D()(x))
    settings = {"loss": _logits_loss(), "metrics": ["accuracy"]}
    ids = np.random.default_rng(2).integers(0, 9, (48, 4))
    return keras.Model(words, outputs), settings, Data(ids, _classes(48))


@keras.saving.register_keras_serializable("exactness")
class Sampling(keras.layers.Layer):
    """A VAE's, without a seed of its own, and with a loss of its own."""

    def call(self, inputs: Any) -> Any:
        mean, log_variance = inputs
        ops = keras.ops
        divergence = ops.square(mean) + ops.exp(log_variance) - log_variance - 1
        self.add_loss(0.05 * ops.mean(ops.sum(divergence, axis=1)))
        noise = keras.random.normal(shape=(ops.shape(mean)[0], ops.shape(mean)[1]))
        return mean + ops.exp(log_variance / 2) * noise


def vae() -> tuple[keras.Model, dict[str, Any], Data]:
    layers = keras.layers
    inputs = keras.Input((6,))
    hidden = layers.Dense(8, activation="tanh")(inputs)
    code = Sampling()([layers.Dense(3)(hidden), layers.Dense(3)(hidden)])
    outputs = layers.Dense(6)(layers.Dense(8, activation="tanh")(code))
    numbers = _numbers(48, 6)
    return keras.Model(inputs, outputs), {"loss": "mse", "metrics": ["mae"]}, Data(numbers, numbers)


def augmented_cnn() -> tuple[keras.Model, dict[str, Any], Data]:
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((5, 5, 2)),
            layers.RandomFlip(),
            layers.RandomRotation(0.1),
            layers.RandomTranslation(0.2, 0.2),
            layers.Conv2D(4, 3, activation="tanh"),
            layers.SpatialDropout2D(0.3),
            layers.GaussianNoise(0.2),
            layers.Flatten(),
            layers.AlphaDropout(0.1),
            layers.Dense(CLASSES),
        ]
    )
    settings = {"loss": _logits_loss(), "metrics": ["accuracy"]}
    return model, settings, Data(_numbers(48, 5, 5, 2), _classes(48))


MODELS = {
    "MLP": mlp,
    "CNN with BN": cnn_with_batch_normalization,
    "Embedding, LSTM, mask": embedding_and_lstm_with_mask,
    "two outputs": two_outputs,
    "own train_step": own_train_step,
    "transformer with dropout": transformer_with_dropout,
    "VAE": vae,
    "augmented CNN": augmented_cnn,
}


class Cell(NamedTuple):
    model: str
    optimizer: str
    size: str


class Trained(NamedTuple):
    """What a cell's training gives: `weights` with the optimizer's, `logs` of all epochs."""

    weights: list[np.ndarray]
    logs: list[float]
    predictions: list[np.ndarray]


def train_all(
    distribute: Callable[[Callable[[], keras.Model]], Any],
    optimizers: Iterable[str] = OPTIMIZERS,
    models: Iterable[str] = MODELS,
    *,
    go_on: bool = False,
) -> Iterator[tuple[Cell, Trained | None]]:
    """Train every cell of the given optimizers and models.

    Args:
        distribute: builder -> something with Keras's fit, evaluate and predict.
        go_on: a training that raises gives None instead.
    """
    optimizers = list(optimizers)
    for name in models:
        for optimizer in optimizers:
            model, data, variables = None, None, []
            for size, (rows, batch) in SIZES.items():
                cell = Cell(name, optimizer, size)
                try:
                    if model is None:
                        model, data, variables = _made(distribute, name, optimizer)
                        start = [variable.numpy() for variable in variables]
                    # The same compiled steps for all sizes: they know no number of rows.
                    for variable, value in zip(variables, start, strict=True):
                        variable.assign(value)
                    # Testing and predicting know no optimizer: with one of them will do.
                    tested = optimizer == list(OPTIMIZERS)[-1]
                    yield cell, _trained(model, data.first(rows), batch, variables, tested)
                except Exception:
                    if not go_on:
                        raise
                    yield cell, None


def _made(distribute: Any, name: str, optimizer: str) -> tuple[Any, Data, list[Any]]:
    def build() -> keras.Model:
        keras.utils.set_random_seed(7)
        model, settings, _ = MODELS[name]()
        model.compile(optimizer=OPTIMIZERS[optimizer](), **settings)
        model.optimizer.build(model.trainable_variables)
        return model

    model = distribute(build)
    inner = getattr(model, "keras_model", model)
    return model, MODELS[name]()[-1], [*inner.weights, *inner.optimizer.variables]


def _trained(model: Any, data: Data, batch: int, variables: list[Any], tested: bool) -> Trained:
    arguments = {"sample_weight": data.sample_weight, "batch_size": batch, "verbose": 0}
    history = model.fit(data.x, data.y, epochs=EPOCHS, shuffle=False, **arguments).history
    logs = [value for name in sorted(history) for value in history[name]]
    predictions = []
    if tested:
        evaluated = model.evaluate(data.x, data.y, return_dict=True, **arguments)
        logs += [evaluated[name] for name in sorted(evaluated)]
        predictions = keras.tree.flatten(model.predict(data.x, batch_size=batch, verbose=0))
    return Trained([variable.numpy() for variable in variables], logs, predictions)


def difference(ours: Trained, one_device: Trained) -> float:
    """The largest difference of a weight or optimizer variable, of a log or a prediction.

    Relative to the largest number of its variable or output, or of the log.
    """

    def relative(a: Any, b: Any) -> float:
        largest = np.abs(b).max(initial=0)
        return float(np.abs(a - b).max(initial=0) / max(largest, 1e-3))

    pairs: list[tuple[Any, Any]] = [*zip(ours.weights, one_device.weights, strict=True)]
    pairs += zip(ours.predictions, one_device.predictions, strict=True)
    pairs += zip(map(np.array, ours.logs), map(np.array, one_device.logs), strict=True)
    return max(relative(a, b) for a, b in pairs)
