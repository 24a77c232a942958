"""Stateful recurrent layers: as in Keras on one replica, refused with a sentence on more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from training_cases import Y, assert_trains_as_keras, distributed_fit, mirrored, strategy_of

import tfdist_ext as tfd
from tfdist_ext.training.building.build import reject_stateful_rnns

SEQUENCES = np.random.default_rng(3).normal(size=(48, 3, 5)).astype("float32")
FIT = {"batch_size": 16, "epochs": 2}


def build(*, sized: bool = True, stateful: bool = True) -> keras.Model:
    first = [keras.Input(batch_shape=(16, 3, 5))] if sized else []
    recurrent = keras.layers.LSTM(4, stateful=stateful, return_sequences=True, name="first")
    both = keras.layers.Bidirectional(keras.layers.GRU(4, stateful=stateful, name="second"))
    model = keras.Sequential([*first, recurrent, both, keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


@pytest.mark.long("default")
@pytest.mark.parametrize("strategy", ["default", "mirrored"])
def test_one_replica_keeps_the_state(strategy: str) -> None:
    plain, ours = assert_trains_as_keras(
        build, SEQUENCES, Y[:48], strategy=strategy_of(strategy, 1), **FIT
    )
    stateless, _ = distributed_fit(
        lambda: build(stateful=False), SEQUENCES, Y[:48], strategy=mirrored(1), **FIT
    )
    state = ours.keras_model.layers[0].states[0].numpy()
    np.testing.assert_allclose(state, plain.layers[0].states[0].numpy(), atol=1e-6)
    expected = plain.predict(SEQUENCES, batch_size=16, verbose=0)
    predicted = ours.predict(SEQUENCES, batch_size=16, verbose=0)
    np.testing.assert_allclose(predicted, expected, atol=1e-6)
    others = stateless.predict(SEQUENCES, batch_size=16, verbose=0)
    assert np.abs(predicted - others).max() > 1e-3


REFUSED = r"got True of 'first', 'backward_second', 'forward_second': .* stateful=False"


@pytest.mark.parametrize("name", ["mirrored", "central_storage"])
@pytest.mark.parametrize("call", ["fit", "evaluate"])
def test_several_replicas_are_refused(name: str, call: str) -> None:
    ours = tfd.distribute(build, strategy_of(name, 2))
    with pytest.raises(tfd.TrainingError, match=f"{REFUSED}.*one_device"):
        getattr(ours, call)(SEQUENCES, Y[:48], batch_size=16, verbose=0)


@pytest.mark.parametrize(
    ("strategy", "model", "message"),
    [
        pytest.param(mirrored, build, "2 replicas", id="replicas"),
        pytest.param(mirrored, lambda: build(sized=False), "2 replicas", id="not built"),
        pytest.param(
            lambda: mirrored(1), lambda: build(sized=False), "batch_shape=", id="size not known"
        ),
        pytest.param(
            lambda: tf.distribute.ParameterServerStrategy.__new__(
                tf.distribute.ParameterServerStrategy
            ),
            build,
            "workers of a ParameterServerStrategy",
            id="parameter servers",
        ),
    ],
)
def test_the_sentence(
    strategy: Callable[[], tf.distribute.Strategy], model: Callable[[], Any], message: str
) -> None:
    with pytest.raises(tfd.TrainingError, match=message):
        reject_stateful_rnns(model(), strategy())
    reject_stateful_rnns(build(stateful=False), mirrored())
