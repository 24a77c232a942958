"""A DistributedModel is what a user takes for a Keras model: all that keras.Model has."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from training_cases import X, Y, assert_trains_as_keras, classifier, mirrored, plain_fit

import tfdist_ext as tfd
from tfdist_ext.training.model import REFUSED

ROOT = Path(__file__).parents[2]


def is_mine(variable: keras.Variable) -> bool:
    return mirrored().extended.variable_created_in_scope(variable.value)


def test_the_page_lists_every_name_of_keras_model() -> None:
    table = runpy.run_path(str(ROOT / "scripts" / "figures" / "keras_model.py"))["table"]()
    page = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    assert table in page, "run scripts/figures/keras_model.py"


def test_names_that_are_delegated_are_those_of_the_keras_model() -> None:
    model = tfd.distribute(classifier(), mirrored())
    model.fit(X, Y, verbose=0)
    names = [name for name in dir(keras.Model) if not name.startswith("_")]
    delegated = [n for n in names if n not in REFUSED and not hasattr(tfd.DistributedModel, n)]
    assert len(delegated) > 50
    asked = {"compiled_loss", "compiled_metrics"}  # warn that they are old
    for name in {*delegated, "history", "stop_training"} - asked:
        theirs: Any = getattr(model.keras_model, name, None)
        ours = getattr(model, name, None)
        assert callable(ours) == callable(theirs), name
        if not callable(theirs):
            assert str(ours) == str(theirs), name
    assert set(dir(model.keras_model)) <= set(dir(model))


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_would_reach_one_replica_alone_is_refused(name: str) -> None:
    model = tfd.distribute(classifier(), mirrored())
    said = rf"{name}\(\) must not be called on a DistributedModel, got a call: .*\(.*\)"
    with pytest.raises(tfd.TrainingError, match=said):
        getattr(model, name)(X)


def test_what_makes_variables_makes_them_for_the_strategy() -> None:
    model = tfd.distribute(lambda: keras.Sequential([keras.layers.Dense(1)]), mirrored())
    model.build((None, 5))
    assert all(map(is_mine, model.weights))
    model.compile_from_config({"optimizer": "adam", "loss": "mse"})
    model.fit(X, Y, verbose=0)
    assert is_mine(model.optimizer.iterations)
    again = tfd.distribute(lambda: keras.Sequential([keras.layers.Dense(1)]), mirrored())
    again.build_from_config(model.get_build_config())
    assert all(map(is_mine, again.weights))


def test_batches_by_hand() -> None:
    plain = classifier()()
    ours = tfd.distribute(plain, mirrored())
    for begin in range(0, 64, 13):
        batch = X[begin : begin + 13], Y[begin : begin + 13]
        for method in ("train_on_batch", "test_on_batch"):
            np.testing.assert_allclose(
                getattr(ours, method)(*batch), getattr(plain, method)(*batch), rtol=1e-5, atol=1e-6
            )
    np.testing.assert_allclose(ours.predict_on_batch(X), plain.predict_on_batch(X), atol=1e-6)
    np.testing.assert_allclose(ours(X), plain(X), atol=1e-6)


def test_tensorflow_is_told_of_export(tmp_path: Path) -> None:
    model = tfd.distribute(classifier(), mirrored())
    said = r"DistributedModel .*export\(folder\) writes a SavedModel"
    with pytest.raises(ValueError, match=said):
        tf.saved_model.save(model, tmp_path)


def normalized(**settings: Any) -> keras.Model:
    layers = keras.layers
    inner = keras.Sequential([layers.Dense(4), layers.BatchNormalization(momentum=0.8, **settings)])
    model = keras.Sequential([keras.Input((5,)), inner, layers.BatchNormalization(**settings)])
    model.add(layers.Dense(1))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


class MadeInTheFirstCall(keras.Model):
    def build(self, shape: Any) -> None:
        self.norm = keras.layers.BatchNormalization(momentum=0.8)
        self.norm.build(shape)
        self.head = keras.layers.Dense(1)
        self.head.build(shape)

    def call(self, x: Any, training: bool = False) -> Any:
        return self.head(self.norm(x, training=training))


def made_in_the_first_call() -> keras.Model:
    model = MadeInTheFirstCall()
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


@pytest.mark.parametrize("build", [normalized, made_in_the_first_call])
@pytest.mark.parametrize("copied", [False, True])
def test_batch_normalization_of_models_that_one_did_not_write(build: Any, copied: bool) -> None:
    data = X[:41], Y[:41]
    one_device, _ = plain_fit(build, *data, batch_size=16, epochs=2)
    keras.utils.set_random_seed(1)
    for synchronize in (True, False):
        keras.utils.set_random_seed(1)
        ours = tfd.distribute(
            build() if copied else build, mirrored(), synchronize_batch_norm=synchronize
        )
        ours.fit(*data, batch_size=16, epochs=2, shuffle=False, verbose=0)
        pairs = zip(ours.get_weights(), one_device.get_weights(), strict=True)
        same = all(np.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in pairs)
        assert same == synchronize


NOT_SYNCHRONIZED = "BatchNormalization is not synchronized in"


def wrapped() -> keras.Model:
    layers = keras.layers
    norm = layers.TimeDistributed(layers.BatchNormalization(name="norm"))
    model = keras.Sequential([keras.Input((5,)), layers.Reshape((5, 1)), norm])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


@pytest.mark.parametrize(
    ("build", "layers"),
    [
        (normalized, r"2 layers \['batch_normalization\w*', 'batch_normalization\w*'\]"),
        (wrapped, r"1 layer \['norm'\]"),
        (made_in_the_first_call, r"1 layer \['batch_normalization\w*'\]"),
    ],
)
def test_batch_normalization_of_each_replica_is_a_warning(build: Any, layers: str) -> None:
    """One warning at `distribute`, or at `fit` if the layers are made in the first call."""
    with pytest.warns(UserWarning, match=f"{NOT_SYNCHRONIZED} {layers}: each replica") as caught:
        model = fit_twice(tfd.distribute(build, mirrored()))
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert NOT_SYNCHRONIZED in str(tfd.explain(model))


def test_no_warning_where_batch_normalization_is_as_on_one_device() -> None:
    frozen = normalized()
    frozen.layers[0].trainable = frozen.layers[1].trainable = False
    frozen.compile("sgd", "mse")
    for model in (
        tfd.distribute(frozen, mirrored()),
        tfd.distribute(normalized(synchronized=True), mirrored()),
        tfd.distribute(normalized, mirrored(), synchronize_batch_norm=True),
        tfd.distribute(normalized, tfd.create_strategy("one_device")),
    ):
        fit_twice(model)  # warnings are errors here
        assert NOT_SYNCHRONIZED not in str(tfd.explain(model))


def test_an_unfrozen_batch_normalization_is_a_warning() -> None:
    frozen = normalized()
    frozen.trainable = False
    model = tfd.distribute(frozen, mirrored())
    model.keras_model.trainable = True
    model.compile("sgd", "mse")
    with pytest.warns(UserWarning, match=f"{NOT_SYNCHRONIZED} 2 layers"):
        fit_twice(model)


def fit_twice(model: tfd.DistributedModel) -> tfd.DistributedModel:
    for _ in range(2):
        model.fit(X[:16], Y[:16], batch_size=8, verbose=0)
    return model


def test_a_copy_is_synchronized_and_not_the_original() -> None:
    model = normalized()
    copy = tfd.distribute(model, mirrored(), synchronize_batch_norm=True)
    assert not model.layers[1].synchronized
    assert copy.layers[1].synchronized
    assert_trains_as_keras(lambda: normalized(synchronized=True), X[:41], Y[:41], batch_size=16)
