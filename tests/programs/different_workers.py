"""One of two workers that differ in one thing at a time: what each is told, as JSON."""

import functools
import json
import os
import tempfile
import warnings
from pathlib import Path

import tfdist_ext as tfd

strategy = tfd.create_strategy()

import keras  # noqa: E402  (importing these first would start TensorFlow too early)
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
from tfdist_ext.strategies.owned_sums import Sums, set_sums  # noqa: E402

RNG = np.random.default_rng(0)
X = RNG.normal(size=(48, 4)).astype("float32")
Y = (X @ RNG.normal(size=(4, 1)) > 0).astype("int32")
result = {}


def layers(activation="relu", last=None):
    return [
        keras.Input((4,)),
        keras.layers.Dense(4, activation=activation),
        last or keras.layers.Dense(1, activation="sigmoid"),
    ]


def builder(parts=layers, optimizer=None, metrics=("accuracy",)):
    def build():
        model = keras.Sequential(parts())
        model.compile(optimizer() if optimizer else "sgd", "mse", metrics=list(metrics))
        return model

    return build


def told(name, call):
    """Note the error, or the warnings, of a call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            call()
        except tfd.TrainingError as error:
            result[name] = f"error: {error}"
        else:
            here = [str(w.message) for w in caught if w.filename == __file__]
            ours = [message for message in here if "on all workers" in message]
            result[name] = "warning: " + ours[0] if ours else "nothing"
    print(name, result[name], flush=True)


def dataset(batch=8):
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(batch)


def shuffled():
    return dataset().unbatch().shuffle(48).batch(8)


def distribute(*args, **options):
    return lambda: tfd.distribute(builder(*args, **options), strategy)


def fit(x, y=None, **options):
    return lambda: model.fit(x() if callable(x) else x, y, **{"verbose": 0, **options})


# Models.
activation = "tanh" if rank else "relu"
told("activation", distribute(lambda: layers(activation)))
told("optimizer", distribute(optimizer=lambda: keras.optimizers.SGD(momentum=rank / 2)))


def given():
    own = builder(lambda: layers(activation))()
    try:
        tfd.distribute(own, strategy)
    finally:
        in_default = tf.distribute.get_strategy().extended.variable_created_in_scope
        result["has_moved"] = not all(in_default(each.value) for each in own.variables)


told("given", given)


def with_dense(units, *, given=True, **options):
    """Layers whose first variables have other shapes on each worker."""
    inputs = [keras.Input((4,))] if given else []
    return [*inputs, keras.layers.Dense(units, **options), keras.layers.Dense(1)]


def fit_deferred():
    deferred = distribute(lambda: with_dense(8 + rank, given=False))()
    deferred.fit(X, Y, batch_size=8, verbose=0)


told("deferred size", fit_deferred)


lookup = keras.layers.StringLookup(vocabulary=["a", "b", "c"] if rank else ["a", "c", "b"])
words = keras.Input((1,), dtype="string")
told("vocabulary", distribute(lambda: [words, lookup, keras.layers.Dense(1)]))


class Shifted(keras.layers.Layer):
    """Variables of the layer's own, not Keras's: they start from the chief's values."""

    def build(self, shape):
        self.shift = tf.Variable(10.0 + rank, trainable=False)

    def call(self, inputs):
        return inputs + self.shift


values = {}


def first_values():
    keras.utils.set_random_seed(rank)
    own_variable = [keras.layers.Dense(2), Shifted()]
    rate = functools.partial(keras.optimizers.SGD, 0.1 + rank)
    made = distribute(lambda: [keras.Input((4,)), *own_variable], optimizer=rate)()
    values["shift"] = [float(own_variable[1].shift.numpy())]
    values["kernel"] = made.get_weights()[0].tolist()
    values["rate"] = float(made.optimizer.learning_rate.numpy())
    in_bfloat16 = distribute(lambda: with_dense(3, dtype="bfloat16"))()
    values["bfloat16"] = in_bfloat16.get_weights()[0].astype(float).tolist()


first_values()
result["first_values"] = values

# What may differ: automatic names, seeds, dicts in another order.
if rank:
    for _ in range(3):
        keras.Sequential(layers())


def harmless():
    noisy = keras.layers.Dense(1, kernel_initializer=keras.initializers.HeNormal(seed=rank))
    return [*layers(last=keras.layers.Dropout(0.5, seed=rank)), noisy]


def fit_harmless():
    keras.utils.set_random_seed(rank)
    fitted = distribute(
        harmless,
        lambda: keras.optimizers.SGD(momentum=0.5),
        metrics=[keras.metrics.AUC()],
    )()
    fitted.fit(X, Y, batch_size=8, verbose=0)


told("harmless", fit_harmless)


def read_by_the_chief():
    """What the chief alone reads, saves and copies changes nothing in the model."""
    fitted = distribute()()
    if rank == 0:
        fitted.get_config()
        keras.saving.save_model(fitted, Path(tempfile.mkdtemp()) / "model.keras")
        keras.models.clone_model(fitted)
        fitted.summary(print_fn=lambda *_, **__: None)
    fitted.compile("adam", "mae")
    fitted.fit(X, Y, batch_size=8, verbose=0)


told("read by the chief", read_by_the_chief)

# Data and calls.
model = distribute()()
told("batches", fit(dataset(8 + rank)))
told("steps", fit(X[: 48 - 8 * rank], Y[: 48 - 8 * rank], batch_size=8))
told("validation", fit(X, Y, validation_data=(X, Y) if rank else None))
told("integers", fit((9 * X).astype("int32") + rank, Y))
told("noise", fit(X * np.float32(1 + rank * 1e-6), Y))
told("one row of x", fit(np.where(np.arange(48)[:, None] == 17, X + rank, X), Y))
tf.random.set_seed(rank)
told("unseeded shuffle", fit(shuffled()))
told("augmentation", fit(dataset().map(lambda x, y: (x + tf.random.normal([4]), y))))


def recompiled():
    model.keras_model.compile("sgd", "mae" if rank else "mse")
    model.evaluate(X, Y, verbose=0)


told("recompiled", recompiled)
model.keras_model.compile("sgd", "mse")


def compiled_by_xla():
    model.keras_model.compile("sgd", "mse", jit_compile=bool(rank))
    model.evaluate(X, Y, verbose=0)


told("jit_compile", compiled_by_xla)
model.keras_model.compile("sgd", "mse")


def assigned_again():
    """Without a seed, after the first fit."""
    own = distribute()()
    own.fit(X, Y, batch_size=8, verbose=0)
    keras.utils.set_random_seed(rank)
    own.layers[0].kernel.assign(keras.random.normal((4, 4)))
    own.fit(X, Y, batch_size=8, verbose=0)


def another_rate():
    own = distribute()()
    own.optimizer.learning_rate = 0.1 + rank
    own.fit(X, Y, batch_size=8, verbose=0)


told("weights", assigned_again)
told("learning rate", another_rate)
set_sums(strategy, Sums(bucket_bytes=1000 * (1 + rank)))
told("bucket_bytes", distribute())
set_sums(strategy, Sums())

# Nothing that looks at the data moves its order, nor does what reads ahead.
import shuffled_training  # noqa: E402

result["order"] = shuffled_training.losses(strategy)
