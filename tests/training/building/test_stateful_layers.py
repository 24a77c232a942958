"""Stateful recurrent layers: as in Keras on one replica, refused with a sentence on more."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from training_cases import Y, assert_trains_as_keras, mirrored

import tfdist_ext as tfd
from tfdist_ext.training.building.build import reject_stateful_rnns

SEQUENCES = np.random.default_rng(3).normal(size=(48, 3, 5)).astype("float32")
FIT = {"batch_size": 16, "epochs": 2}


def build() -> keras.Model:
    first = keras.layers.LSTM(4, stateful=True, return_sequences=True, name="first")
    both = keras.layers.Bidirectional(keras.layers.GRU(4, stateful=True, name="second"))
    inputs = keras.Input(batch_shape=(16, 3, 5))
    model = keras.Sequential([inputs, first, both, keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def test_one_replica_keeps_the_state() -> None:
    plain, ours = assert_trains_as_keras(build, SEQUENCES, Y[:48], strategy=mirrored(1), **FIT)
    state = ours.keras_model.layers[0].states[0].numpy()
    np.testing.assert_allclose(state, plain.layers[0].states[0].numpy(), atol=1e-6)
    expected = plain.predict(SEQUENCES, batch_size=16, verbose=0)
    predicted = ours.predict(SEQUENCES, batch_size=16, verbose=0)
    np.testing.assert_allclose(predicted, expected, atol=1e-6)


REFUSED = r"'first', 'backward_second', 'forward_second' must not be stateful.* stateful=False"


def test_several_replicas_are_refused() -> None:
    ours = tfd.distribute(build, mirrored(2))
    for call in (ours.fit, ours.evaluate):
        with pytest.raises(tfd.TrainingError, match=f"{REFUSED}.*one_device"):
            call(SEQUENCES, Y[:48], batch_size=16, verbose=0)


def test_parameter_servers_are_refused() -> None:
    servers = tf.distribute.ParameterServerStrategy.__new__(tf.distribute.ParameterServerStrategy)
    with pytest.raises(tfd.TrainingError, match="stateful on ParameterServerStrategy"):
        reject_stateful_rnns(build(), servers)
