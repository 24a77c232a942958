"""A model that is deleted keeps nothing: neither objects, nor the graphs of its steps."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import keras
import pytest
from training_cases import X, Y, mirrored

import tfdist_ext as tfd

FIT = {"batch_size": 16, "verbose": 0, "shuffle": False}


@pytest.fixture(autouse=True)
def _collected() -> Iterator[None]:
    """Objects of tests before are of no interest, and those of this one are looked at again."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def build() -> keras.Model:
    inputs = keras.Input((5,))
    hidden = keras.layers.Dense(4, activation="relu")(inputs)
    hidden = keras.layers.Dropout(0.5)(keras.layers.BatchNormalization()(hidden))
    model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
    model.compile(keras.optimizers.Adam(0.01, clipnorm=1.0), "mse", metrics=["mae"])
    return model


def test_a_deleted_model_is_collected_with_the_graphs_of_its_steps() -> None:
    class Breaks(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            raise ZeroDivisionError

    model = tfd.distribute(build, mirrored(), synchronize_batch_norm=False)
    with pytest.raises(ZeroDivisionError):
        model.fit(X, Y, callbacks=[Breaks()], **FIT)
    model.fit(X, Y, validation_data=(X[:16], Y[:16]), **FIT)
    model.predict(X, verbose=0)
    program = model._tfdist_ext.loop("train").program
    (step,) = program._executions[True, False]._list_all_concrete_functions()
    alive = {
        "model": weakref.ref(model),
        "Keras model": weakref.ref(model.keras_model),
        "kernel": weakref.ref(model.keras_model.layers[1].kernel),
        "optimizer": weakref.ref(model.keras_model.optimizer),
        "engine": weakref.ref(model._tfdist_ext.engine),
        "program": weakref.ref(program),
        "seeds": weakref.ref(model._tfdist_ext.engine._seeds),
        "graph": weakref.ref(step.graph),
    }
    del model, program, step
    gc.collect()
    assert [name for name, of in alive.items() if of() is not None] == []
