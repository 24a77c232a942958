"""A worker of a cluster whose gradients travel in 16 bits; prints its results as JSON.

Argument: options of the strategy, as JSON.
"""

import json
import sys

import tfdist_ext as tfd

strategy = tfd.create_strategy(**json.loads(sys.argv[1]), bucket_bytes=400)

import keras  # noqa: E402  (importing these first would start TensorFlow too early)
import numpy as np  # noqa: E402
import sharded_optimizer_models as models  # noqa: E402

from tfdist_ext.training.model import distribute_on  # noqa: E402
from tfdist_ext.training.variables import default_strategy  # noqa: E402

OPTIMIZERS = {
    "SGD": lambda: keras.optimizers.SGD(0.1),
    "clipnorm": models.OPTIMIZERS["clipnorm"],
    "loss scaling": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)),
    "lazy AdamW": models.OPTIMIZERS["lazy AdamW"],
}


def build_of_integers():
    """A model whose gradients have few digits."""
    ids, x = keras.Input((), dtype="int32"), keras.Input((5,))
    rows = keras.layers.Embedding(7, 5, embeddings_initializer="ones", name="table")(ids)
    y = keras.layers.Dense(300, use_bias=False, kernel_initializer="ones")(x + rows)
    model = keras.Model([ids, x], keras.ops.sum(y, axis=1, keepdims=True))
    model.compile(keras.optimizers.SGD(0.5), "mae")
    return model


def integers():
    random = np.random.default_rng(0)
    x = random.integers(0, 3, (8, 5)).astype("float32")
    return [np.arange(8) % 7, x], np.full((8, 1), -1e6, "float32")


def trained(build, data, epochs=2, **options):
    """The weights of one device and of all workers, trained from the same weights."""
    found = []
    for on in (default_strategy(), strategy):
        keras.utils.set_random_seed(1)
        model = distribute_on(build, on, **options)
        model.fit(*data, **{**models.FIT, "epochs": epochs})
        found.append([np.asarray(weight) for weight in model.weights])
    return found


def differences(one_device, ours):
    return [float(np.abs(a - b).max()) for a, b in zip(one_device, ours, strict=True)]


def resumed(folder):
    """The weights of two epochs, and of one that is resumed for another."""
    found = []
    for runs in ((2,), (1, 2)):
        for epochs in runs:
            keras.utils.set_random_seed(1)
            model = tfd.distribute(lambda: models.build(keras.optimizers.Adam(0.01)), strategy)
            options = {**models.FIT, "epochs": epochs}
            model.fit(*models.data(), **options, checkpoint_dir=f"{folder}/{len(runs)}")
        found.append([np.asarray(weight) for weight in model.weights])
    return found


result = {"explain": str(tfd.explain(strategy)), "weights": {}, "optimizers": {}}
result["exact"] = differences(*trained(build_of_integers, integers(), epochs=1))
for name, make in OPTIMIZERS.items():
    options = {"lazy_updates": name.startswith("lazy")}
    weights = trained(lambda make=make: models.build(make()), models.data(), **options)
    result["optimizers"][name] = differences(*weights)
    result["weights"][name] = [weight.astype(float).tolist() for weight in weights[1]]
result["verified"] = str(
    tfd.verify(lambda: models.build(OPTIMIZERS["SGD"]()), models.data(), strategy, batch_size=16)
)
if len(sys.argv) > 2:
    result["resumed"] = differences(*resumed(sys.argv[2]))
