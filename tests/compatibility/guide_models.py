"""Models as Keras's guides and examples write them: steps and callbacks of their own, a tuner."""

from __future__ import annotations

import functools
import tempfile
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from two_steps import BATCH, Timer

import tfdist_ext as tfd
from tfdist_ext.training.verify import Trainings

ops, layers = keras.ops, keras.layers
WIDTH, NOISE = 6, 4


def sgd() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.01, momentum=0.9)


def functional(model: type[keras.Model] = keras.Model, **settings: Any) -> keras.Model:
    inputs = keras.Input((WIDTH,))
    x = layers.Dropout(0.2)(layers.Dense(8, activation="tanh")(inputs))
    made = model(inputs, layers.Dense(1)(x))
    made.compile(**{"optimizer": sgd(), "loss": "mse", "jit_compile": False, **settings})
    return made


def compiled(model: Callable[[], keras.Model], **settings: Any) -> keras.Model:
    made = model()
    made.compile(optimizer=sgd(), jit_compile=False, **settings)
    return made


class OwnStep(keras.Model):
    """A step with the compiled loss and metrics, and weights of samples."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=predicted, sample_weight=weights)
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply(gradients, self.trainable_weights)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, predicted, sample_weight=weights)
        return {metric.name: metric.result() for metric in self.metrics}


class OwnTrackers(keras.Model):
    """A loss and metrics of its own, and nothing compiled but the optimizer."""

    def __init__(self, *args: Any, **settings: Any):
        super().__init__(*args, **settings)
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.error = keras.metrics.MeanAbsoluteError(name="mae")

    @property
    def metrics(self) -> list[Any]:
        return [self.loss_tracker, self.error]

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = ops.mean(keras.losses.huber(y, predicted))
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        self.loss_tracker.update_state(loss)
        self.error.update_state(y, predicted)
        return {metric.name: metric.result() for metric in self.metrics}


class OwnLoss(keras.Model):
    """A compute_loss of its own, and a penalty of a layer."""

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        loss = ops.mean(ops.square(y_pred - y)) + sum(self.losses)
        return loss + 0.1 * ops.mean(ops.abs(y_pred))


def discriminator() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((WIDTH,)),
            layers.Dense(8),
            layers.LeakyReLU(negative_slope=0.2),
            layers.Dropout(0.3),
            layers.Dense(1),
        ]
    )


def generator() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((NOISE,)),
            layers.Dense(8),
            layers.BatchNormalization(),
            layers.LeakyReLU(negative_slope=0.2),
            layers.Dense(WIDTH),
        ]
    )


class GAN(keras.Model):
    """Real and generated rows one after another, and noise in the labels."""

    def __init__(self) -> None:
        super().__init__()
        self.discriminator, self.generator = discriminator(), generator()
        self.d_loss = keras.metrics.Mean(name="d_loss")
        self.g_loss = keras.metrics.Mean(name="g_loss")
        self.seed = keras.random.SeedGenerator(1337)
        self.built = True

    def compile(self, d_optimizer: Any, g_optimizer: Any, loss: Any) -> None:
        super().compile(jit_compile=False)
        self.d_optimizer, self.g_optimizer, self.loss_fn = d_optimizer, g_optimizer, loss

    @property
    def metrics(self) -> list[Any]:
        return [self.d_loss, self.g_loss]

    def train_step(self, real: Any) -> dict[str, Any]:
        rows = ops.shape(real)[0]
        noise = keras.random.normal((rows, NOISE), seed=self.seed)
        images = ops.concatenate([self.generator(noise, training=True), real], axis=0)
        labels = ops.concatenate([ops.ones((rows, 1)), ops.zeros((rows, 1))], axis=0)
        labels = labels + 0.05 * keras.random.uniform(ops.shape(labels), seed=self.seed)
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(labels, self.discriminator(images, training=True))
        weights = self.discriminator.trainable_weights
        self.d_optimizer.apply(tape.gradient(d_loss, weights), weights)

        misleading = ops.zeros((rows, 1))
        return self.train_generator(rows, d_loss, lambda found: self.loss_fn(misleading, found))

    def train_generator(self, rows: Any, d_loss: Any, loss_of: Callable[[Any], Any]) -> Any:
        noise = keras.random.normal((rows, NOISE), seed=self.seed)
        with tf.GradientTape() as tape:
            made = self.generator(noise, training=True)
            g_loss = loss_of(self.discriminator(made, training=True))
        weights = self.generator.trainable_weights
        self.g_optimizer.apply(tape.gradient(g_loss, weights), weights)
        self.d_loss.update_state(d_loss)
        self.g_loss.update_state(g_loss)
        return {metric.name: metric.result() for metric in self.metrics}


def gan(model: type[GAN] = GAN) -> keras.Model:
    made = model()
    made.compile(sgd(), sgd(), keras.losses.BinaryCrossentropy(from_logits=True))
    return made


class GradientPenalty(GAN):
    """A WGAN-GP: points between real and generated rows, and the gradient there."""

    def train_step(self, real: Any) -> dict[str, Any]:
        rows = ops.shape(real)[0]
        for _ in range(2):
            noise = keras.random.normal((rows, NOISE), seed=self.seed)
            with tf.GradientTape() as tape:
                made = self.generator(noise, training=True)
                d_loss = ops.mean(self.discriminator(made, training=True))
                d_loss -= ops.mean(self.discriminator(real, training=True))
                d_loss += 10.0 * self.penalty(rows, real, made)
            weights = self.discriminator.trainable_weights
            self.d_optimizer.apply(tape.gradient(d_loss, weights), weights)
        return self.train_generator(rows, d_loss, lambda found: -ops.mean(found))

    def penalty(self, rows: Any, real: Any, made: Any) -> Any:
        share = keras.random.uniform((rows, 1), seed=self.seed)
        between = real + share * (made - real)
        with tf.GradientTape() as tape:
            tape.watch(between)
            predicted = self.discriminator(between, training=True)
        slope = tape.gradient(predicted, [between])[0]
        return ops.mean((ops.sqrt(ops.sum(ops.square(slope), axis=1)) - 1.0) ** 2)


class Sampling(layers.Layer):
    def __init__(self, **settings: Any):
        super().__init__(**settings)
        self.seed = keras.random.SeedGenerator(3)

    def call(self, inputs: Any) -> Any:
        mean, log_variance = inputs
        noise = keras.random.normal(ops.shape(mean), seed=self.seed)
        return mean + ops.exp(0.5 * log_variance) * noise


class VAE(keras.Model):
    """An encoder, a decoder, and three trackers."""

    def __init__(self) -> None:
        super().__init__()
        inputs = keras.Input((WIDTH,))
        x = layers.Dense(8, activation="tanh")(inputs)
        code = [layers.Dense(NOISE)(x), layers.Dense(NOISE)(x)]
        self.encoder = keras.Model(inputs, [*code, Sampling()(code)])
        self.decoder = keras.Sequential([keras.Input((NOISE,)), layers.Dense(WIDTH)])
        names = ("loss", "reconstruction", "divergence")
        self.trackers = [keras.metrics.Mean(name=name) for name in names]

    @property
    def metrics(self) -> list[Any]:
        return self.trackers

    def train_step(self, data: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            mean, log_variance, code = self.encoder(data, training=True)
            error = ops.sum(ops.square(data - self.decoder(code)), axis=1)
            divergence = 1 + log_variance - ops.square(mean) - ops.exp(log_variance)
            divergence = ops.mean(ops.sum(-0.5 * divergence, axis=1))
            loss = ops.mean(error) + divergence
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        for tracker, value in zip(self.trackers, (loss, ops.mean(error), divergence), strict=True):
            tracker.update_state(value)
        return {tracker.name: tracker.result() for tracker in self.trackers}


class Distiller(keras.Model):
    """A student that learns from labels and from a teacher."""

    def __init__(self) -> None:
        super().__init__()
        self.student = keras.Sequential([keras.Input((WIDTH,)), layers.Dense(3)])
        self.teacher = keras.Sequential([keras.Input((WIDTH,)), layers.Dense(8), layers.Dense(3)])
        self.teacher.trainable = False

    def call(self, x: Any) -> Any:
        return self.student(x)

    def compute_loss(self, x: Any, y: Any, y_pred: Any, *_: Any, **settings: Any) -> Any:
        wanted = ops.softmax(self.teacher(x, training=False) / 3.0)
        found = ops.log_softmax(y_pred / 3.0)
        distance = ops.mean(ops.sum(wanted * (ops.log(wanted) - found), axis=1))
        labels = keras.losses.SparseCategoricalCrossentropy(from_logits=True)(y, y_pred)
        return 0.1 * labels + 0.9 * distance * 9.0


class Diffusion(keras.Model):
    """Noise and times for each row, and an average of the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.network, self.averaged = (self.made() for _ in range(2))
        self.averaged.set_weights(self.network.get_weights())
        self.tracker = keras.metrics.Mean(name="noise_loss")

    def made(self) -> keras.Model:
        noisy, times = keras.Input((WIDTH,)), keras.Input((1,))
        x = layers.Concatenate()([noisy, ops.sin(10.0 * times)])
        x = layers.BatchNormalization()(layers.Dense(8, activation="swish")(x))
        return keras.Model([noisy, times], layers.Dense(WIDTH)(x))

    @property
    def metrics(self) -> list[Any]:
        return [self.tracker]

    def train_step(self, x: Any) -> dict[str, Any]:
        noise = keras.random.normal(shape=ops.shape(x))
        times = keras.random.uniform(shape=(ops.shape(x)[0], 1))
        noisy = ops.cos(times) * x + ops.sin(times) * noise
        with tf.GradientTape() as tape:
            loss = self.compiled_error(noise, self.network([noisy, times], training=True))
        weights = self.network.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        for weight, mean in zip(self.network.weights, self.averaged.weights, strict=True):
            mean.assign(0.9 * mean + 0.1 * weight)
        self.tracker.update_state(loss)
        return {"noise_loss": self.tracker.result()}

    def compiled_error(self, noise: Any, found: Any) -> Any:
        return keras.losses.MeanAbsoluteError()(noise, found)


class Contrastive(keras.Model):
    """SimCLR: two views of each row, all others are negatives; one line for their rows."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = keras.Sequential([keras.Input((WIDTH,)), layers.Dense(8), layers.Dense(4)])
        self.views = [keras.Sequential([layers.GaussianNoise(s)]) for s in (0.1, 0.2)]
        self.tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self) -> list[Any]:
        return [self.tracker]

    def train_step(self, x: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            codes = [self.encoder(view(x, training=True), training=True) for view in self.views]
            one, other = (tfd.all_rows(ops.normalize(code, axis=1)) for code in codes)
            likeness = ops.matmul(one, ops.transpose(other)) / 0.1
            labels = ops.arange(ops.shape(likeness)[0])
            loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            loss = loss_of(labels, likeness) + loss_of(labels, ops.transpose(likeness))
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply(gradients, self.trainable_weights)
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}


class StopsAtTheLeast(keras.callbacks.Callback):
    """Restores the best weights, and stops."""

    def on_train_begin(self, logs: Any = None) -> None:
        self.least, self.best = np.inf, None

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if logs["loss"] < self.least:
            self.least, self.best = logs["loss"], self.model.get_weights()
        else:
            self.model.stop_training = True
            self.model.set_weights(self.best)


class Slows(keras.callbacks.Callback):
    """A learning rate of each epoch."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.model.optimizer.learning_rate = 0.1 / (1 + epoch)


def own_callbacks() -> list[Any]:
    return [StopsAtTheLeast(), Slows()]


def keras_callbacks() -> list[Any]:
    callbacks = keras.callbacks
    return [
        callbacks.EarlyStopping("loss", patience=2, restore_best_weights=True),
        callbacks.ReduceLROnPlateau("loss", patience=1, min_delta=10.0),
        callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5),
        callbacks.TerminateOnNaN(),
        callbacks.SwapEMAWeights(swap_on_epoch=True),
    ]


def averaged() -> keras.Model:
    return functional(optimizer=keras.optimizers.Adam(0.01, use_ema=True))


class Searches(Trainings):
    """KerasTuner: two trials of a model that `build` distributes; the numbers are their scores."""

    def __init__(self, timer: Timer):
        self._timer = timer

    def _train(self, strategy: tf.distribute.Strategy | None = None, **options: Any) -> Any:
        import keras_tuner

        def build(hp: Any) -> keras.Model:
            keras.utils.set_random_seed(7)
            model = functional()
            model.optimizer.learning_rate = hp.Choice("rate", [0.1, 0.01])
            return model if strategy is None else tfd.distribute(model, strategy)

        started = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            tuner = keras_tuner.GridSearch(build, "loss", directory=folder, overwrite=True)
            given = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
            tuner.search(**regression(), epochs=2, callbacks=[], **given)
            trials = tuner.oracle.trials.values()
        scores = {f"log of rate {each.hyperparameters.get('rate')}": each.score for each in trials}
        assert len(scores) == 2
        self._timer.seconds.append(time.monotonic() - started)
        return scores


def regression() -> dict[str, Any]:
    random = np.random.default_rng(0)
    return {"x": random.normal(size=(8, WIDTH)), "y": random.normal(size=(8, 1))}


def rows_alone() -> dict[str, Any]:
    return {"x": regression()["x"]}


def labeled() -> dict[str, Any]:
    return {**regression(), "y": np.random.default_rng(1).integers(0, 3, 8)}


def weighted() -> dict[str, Any]:
    return {**regression(), "sample_weight": np.linspace(0.5, 2, 8)}


def distiller() -> keras.Model:
    return compiled(Distiller, metrics=["sparse_categorical_accuracy"])


# name, builder, data, lines changed, callbacks
GUIDES: list[tuple[str, Callable[[], Any], Callable[[], dict[str, Any]], int, Any]] = [
    ("train_step, sample weights", functools.partial(functional, OwnStep), weighted, 1, list),
    ("train_step, own trackers", functools.partial(functional, OwnTrackers), regression, 1, list),
    ("compute_loss", functools.partial(functional, OwnLoss), regression, 1, list),
    ("GAN", gan, rows_alone, 1, list),
    ("WGAN-GP", functools.partial(gan, GradientPenalty), rows_alone, 1, list),
    ("VAE", functools.partial(compiled, VAE), rows_alone, 1, list),
    ("distillation", distiller, labeled, 1, list),
    ("diffusion", functools.partial(compiled, Diffusion), rows_alone, 1, list),
    ("SimCLR", functools.partial(compiled, Contrastive), rows_alone, 2, list),
    ("own callbacks", functional, lambda: {**regression(), "epochs": 4}, 1, own_callbacks),
    ("Keras's callbacks", averaged, lambda: {**regression(), "epochs": 4}, 1, keras_callbacks),
]
