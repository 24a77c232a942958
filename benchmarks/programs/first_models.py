"""The models of first_step.py, short_fits.py and two_workers.py, and a batch of data for each."""

import keras
import numpy as np


def mlp():
    return keras.Sequential(
        [keras.Input((64,)), keras.layers.Dense(256, activation="relu"), keras.layers.Dense(10)]
    )


def transformer():
    layers = keras.layers
    x = inputs = keras.Input((32,), dtype="int32")
    x = layers.Embedding(1000, 128)(x)
    for _ in range(4):
        x = layers.LayerNormalization()(x + layers.MultiHeadAttention(4, 32)(x, x))
        hidden = layers.Dense(512, activation="relu")(x)
        x = layers.LayerNormalization()(x + layers.Dense(128)(hidden))
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)))


def resnet():
    return keras.applications.ResNet50(
        weights=None, input_shape=(32, 32, 3), classes=10, classifier_activation=None
    )


def embedding():
    layers = keras.layers
    ids = keras.Input((4,), dtype="int32")
    x = layers.Flatten()(layers.Embedding(100_000, 32)(ids))
    return keras.Model(ids, layers.Dense(10)(layers.Dense(64, activation="relu")(x)))


def recommender():
    layers = keras.layers
    ids = keras.Input((TABLES,), dtype="int32")
    rows = [layers.Embedding(1000, 16)(ids[:, table]) for table in range(TABLES)]
    hidden = layers.Dense(64, activation="relu")(layers.Concatenate()(rows))
    return keras.Model(ids, layers.Dense(10)(hidden))


TABLES = 26
MODELS = {
    "MLP 64-256-10": mlp,
    "4-layer transformer, d=128": transformer,
    "ResNet50": resnet,
    "Embedding of 100,000 x 32": embedding,
    "26 tables of 1,000 x 16": recommender,
}


def compiled(name):
    model = MODELS[name]()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(), loss, metrics=["accuracy"])
    return model


def batch(name, rows):
    random = np.random.default_rng(0)
    labels = random.integers(0, 10, rows).astype("int32")
    if name == "MLP 64-256-10":
        return random.random((rows, 64), "float32"), labels
    if name == "ResNet50":
        return random.random((rows, 32, 32, 3), "float32"), labels
    if name == "Embedding of 100,000 x 32":
        return random.integers(0, 100_000, (rows, 4)).astype("int32"), labels
    width = TABLES if name.startswith("26 tables") else 32
    return random.integers(0, 1000, (rows, width)).astype("int32"), labels
