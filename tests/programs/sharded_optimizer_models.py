"""A model with weights of all kinds, and every optimizer of Keras, for workers that share one."""

import keras
import numpy as np
import tensorflow as tf

optimizers = keras.optimizers
FIT = {"batch_size": 16, "epochs": 2, "shuffle": False, "verbose": 0}  # a last batch of 2 rows


def adamw_without_some():
    optimizer = optimizers.AdamW(0.01, weight_decay=0.1)
    optimizer.exclude_from_weight_decay(var_names=["hidden", "bias"])
    return optimizer


OPTIMIZERS = {
    "SGD": lambda: optimizers.SGD(0.1),
    "SGD, Nesterov": lambda: optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "RMSprop": lambda: optimizers.RMSprop(0.01, centered=True, momentum=0.5),
    "Adam": lambda: optimizers.Adam(0.01),
    "Adam, AMSGrad": lambda: optimizers.Adam(0.01, amsgrad=True),
    "AdamW": adamw_without_some,
    "Adadelta": lambda: optimizers.Adadelta(1.0),
    "Adagrad": lambda: optimizers.Adagrad(0.1),
    "Adamax": lambda: optimizers.Adamax(0.01),
    "Nadam": lambda: optimizers.Nadam(0.01),
    "Ftrl": lambda: optimizers.Ftrl(0.1),
    "Lion": lambda: optimizers.Lion(0.01),
    "Adafactor": lambda: optimizers.Adafactor(0.01),
    "Lamb": lambda: optimizers.Lamb(0.01),
    "Muon": lambda: optimizers.Muon(0.01),
    "clipnorm": lambda: optimizers.SGD(0.5, clipnorm=0.05),
    "global_clipnorm": lambda: optimizers.Adam(0.01, global_clipnorm=0.1),
    "clipvalue": lambda: optimizers.SGD(0.5, clipvalue=0.01),
    "EMA": lambda: optimizers.Adam(0.01, use_ema=True, ema_momentum=0.9),
    "EMA that overwrites": lambda: optimizers.SGD(
        0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=3
    ),
    "accumulation, clipped": lambda: optimizers.Adam(
        0.01, gradient_accumulation_steps=3, global_clipnorm=0.1
    ),
    "loss scaling": lambda: optimizers.LossScaleOptimizer(optimizers.Adam(0.01, clipnorm=0.2)),
    "lazy AdamW": lambda: optimizers.AdamW(0.01, weight_decay=0.1),
    "lazy RMSprop": lambda: optimizers.RMSprop(0.01, centered=True, momentum=0.5),
    "schedule": lambda: optimizers.Adam(optimizers.schedules.ExponentialDecay(0.02, 2, 0.7)),
}
if hasattr(optimizers, "MultiOptimizer"):  # Keras 3.15
    OPTIMIZERS["MultiOptimizer"] = lambda: optimizers.MultiOptimizer(
        optimizers.OptimizerMap(
            optimizers.SGD(0.1, momentum=0.9), {"hidden/.*": optimizers.Adam(0.01)}
        )
    )
# One for each way of dividing an optimizer; scripts/exactness trains all.
KINDS = [
    "Adam",
    "Adafactor",
    "Lamb",
    "Muon",
    "global_clipnorm",
    "EMA that overwrites",
    "accumulation, clipped",
    "loss scaling",
    "lazy AdamW",
    *(["MultiOptimizer"] if "MultiOptimizer" in OPTIMIZERS else []),
]


@keras.saving.register_keras_serializable()
class OfOneWeight(optimizers.SGD):
    """Scales each gradient by its own mean."""

    def update_step(self, gradient, variable, learning_rate):
        mean = keras.ops.mean(keras.ops.abs(gradient))
        super().update_step(gradient / (1.0 + mean), variable, learning_rate)


class OfAllWeights(optimizers.SGD):
    """Has a state for all weights, which each of them changes."""

    def build(self, variables):
        super().build(variables)
        self.seen = self.add_variable((), name="seen")


def data():
    numbers = np.random.default_rng(0)
    x = numbers.normal(size=(50, 6)).astype("float32"), numbers.integers(0, 11, (50, 3))
    return x, numbers.normal(size=(50, 1)).astype("float32")


@keras.saving.register_keras_serializable()
class Scaled(keras.layers.Layer):
    """Its one number has an owner: the slots of the other workers are empty."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(), initializer="ones", name="scale")

    def call(self, x):
        return self.scale * x


def build(optimizer, model_class=keras.Model, **settings):
    """A model with a table, a weight that a constraint looks at as a whole, and small weights."""
    layers = keras.layers
    x, ids = keras.Input((6,)), keras.Input((3,), dtype="int32")
    words = layers.Flatten()(layers.Embedding(11, 4, name="words")(ids))
    hidden = layers.Dense(17, activation="tanh", name="hidden")(layers.Concatenate()([x, words]))
    limit = keras.constraints.MaxNorm(0.9)
    limited = layers.Dense(8, kernel_constraint=limit, name="limited")(hidden)
    model = model_class([x, ids], layers.Dense(1, name="last")(Scaled(name="scaled")(limited)))
    model.compile(optimizer, "mse", **settings)
    return model


class OwnStep(keras.Model):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_weights)
        gradients, _ = tf.clip_by_global_norm(gradients, 0.2)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        return {"loss": loss}


def build_own_step():
    return build(optimizers.Adam(0.01), OwnStep)


def build_eager():
    return build(optimizers.Adam(0.01, global_clipnorm=0.1), run_eagerly=True)
