"""What takes long says so, and only then."""

from __future__ import annotations

import time

import keras
import pytest
import tensorflow as tf
from training_cases import X, Y, compiled, mirrored, stack

import tfdist_ext as tfd
from tfdist_ext.training.synchronous import model_step


class Slow(keras.layers.Layer):
    def call(self, x: tf.Tensor) -> tf.Tensor:
        if not isinstance(x, keras.KerasTensor):  # while the step is traced
            time.sleep(0.3)
        return x


def test_the_first_step_says_that_it_is_compiled_and_the_second_does_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(model_step, "FIRST_AFTER", 0.1)
    model = tfd.distribute(compiled(stack(Slow(), keras.layers.Dense(1))), mirrored(2))
    for says in (True, False):
        model.fit(X, Y, verbose=0)
        assert ("compiling the first step (2 replicas) ...\n" in capsys.readouterr().err) == says
