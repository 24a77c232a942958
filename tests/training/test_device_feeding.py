"""TensorFlow's distributed iterator, which feeds GPUs and TPUs, here on CPUs."""

from __future__ import annotations

import keras
import numpy as np
from training_cases import (
    TOLERANCE,
    X,
    Y,
    batches,
    classifier,
    mirrored,
    of_unknown_length,
    plain_fit,
)

import tfdist_ext as tfd


def test_the_distributed_iterator_feeds_the_same_parts() -> None:
    plain, _ = plain_fit(classifier("adam"), X, Y, batch_size=16, epochs=2)
    keras.utils.set_random_seed(1)
    model = tfd.distribute(classifier("adam"), mirrored())
    assert model._reduction.feeds_on_host
    model._reduction.feeds_on_host = False
    model.fit(X, Y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    for ours, keras_s in zip(model.keras_model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(ours, keras_s, atol=TOLERANCE)

    uneven = of_unknown_length(batches(rows=41))
    expected = plain.evaluate(X[:41], Y[:41], verbose=0)
    np.testing.assert_allclose(model.evaluate(uneven, verbose=0)[1], expected[1], atol=1e-6)
    np.testing.assert_allclose(
        model.predict(uneven, verbose=0), plain.predict(X[:41], verbose=0), atol=1e-6
    )
