"""What takes long says so, and only then."""

from __future__ import annotations

import re
import time

import pytest
import tensorflow as tf

import tfdist_ext as tfd
from tfdist_ext.training.synchronous import model_step as progress


def test_the_first_step_says_that_it_is_compiled_and_the_second_does_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import keras

    class Slow(keras.layers.Layer):
        def call(self, x):  # runs while the step is traced
            if not isinstance(x, keras.KerasTensor):
                time.sleep(0.3)
            return x

    def build() -> keras.Model:
        model = keras.Sequential([keras.Input((2,)), Slow(), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    monkeypatch.setattr(progress, "FIRST_AFTER", 0.1)
    model = tfd.distribute(build, tfd.create_strategy("mirrored", devices=["CPU:0", "CPU:1"]))
    x = tf.ones((4, 2))
    model.fit(x, x[:, :1], batch_size=4, verbose=0)
    first = capsys.readouterr().err
    assert re.search(r"^compiling the first step \(2 replicas\) \.\.\.$", first, re.M)
    model.fit(x, x[:, :1], batch_size=4, verbose=0)
    assert "compiling" not in capsys.readouterr().err
