"""Keras on the template and on strategies that change its hooks, from one to another."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from template_cases import Mixed, Owned, OwnedAndPairwise, Pairwise, ReadAsMean, Shared

import tfdist_ext as tfd
from tfdist_ext.strategies import StrategyTemplate, registry

ROWS = np.random.default_rng(0).normal(size=(41, 5)).astype("float32")
IDS = np.random.default_rng(1).integers(0, 12, (41, 3))
LABELS = (ROWS.sum(axis=1, keepdims=True) > 0).astype("float32")


def build(optimizer: str = "adamw") -> keras.Model:
    """A table, BatchNormalization, clipping by global norm and an average of the weights."""
    keras.utils.set_random_seed(1)
    layers = keras.layers
    rows, ids = keras.Input([5], name="rows"), keras.Input([3], dtype="int32", name="ids")
    embedded = layers.Flatten()(layers.Embedding(12, 4)(ids))
    hidden = layers.Dense(8, "tanh")(layers.Concatenate()([rows, embedded]))
    hidden = layers.BatchNormalization(synchronized=True)(hidden)
    model = keras.Model([rows, ids], layers.Dense(1, "sigmoid")(hidden))
    made = keras.optimizers.SGD(0.1)
    if optimizer == "adamw":
        average = {"use_ema": True, "ema_momentum": 0.8, "ema_overwrite_frequency": 3}
        made = keras.optimizers.AdamW(0.01, weight_decay=0.1, global_clipnorm=0.3, **average)
    model.compile(made, "binary_crossentropy", metrics=["accuracy"])
    model.optimizer.build(model.trainable_variables)
    return model


def train(
    model: Any, epochs: int = 2, *, and_test: bool = True
) -> tuple[list[float], list[np.ndarray]]:
    """(all losses and metrics, all variables) of uneven batches of 12 rows."""
    data = [ROWS, IDS]
    fitted = model.fit(data, LABELS, batch_size=12, epochs=epochs, shuffle=False, verbose=0)
    logs = [value for name in sorted(fitted.history) for value in fitted.history[name]]
    inner = getattr(model, "keras_model", model)
    values = [v.numpy() for v in [*inner.weights, *inner.optimizer.variables]]
    if and_test:
        logs += model.evaluate(data, LABELS, batch_size=12, verbose=0)
        values.append(model.predict(data, batch_size=12, verbose=0))
    return logs, values


def assert_equal(one: Any, other: Any, tolerance: float = 1e-6) -> None:
    np.testing.assert_allclose(one[0], other[0], rtol=1e-5, atol=tolerance)
    for a, b in zip(one[1], other[1], strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance)


@pytest.mark.parametrize("cls", [StrategyTemplate, Mixed, Shared, OwnedAndPairwise])
def test_where_keras_s_variables_are(cls: Any) -> None:
    strategy = cls(3)
    model = tfd.distribute(build, strategy).keras_model
    copies = {len(strategy.copies(v.value)) for v in model.trainable_weights}
    assert copies == {Mixed: {1, 3}, Shared: {1}}.get(cls, {3})


def test_slots_lie_beside_their_variables() -> None:
    strategy = Owned(3)
    model = tfd.distribute(build, strategy).keras_model
    kernel = model.layers[-1].kernel
    index = [v.path for v in model.trainable_variables].index(kernel.path)
    assert len(strategy.copies(kernel.value)) == 3
    for slots in (model.optimizer._momentums, model.optimizer._velocities):
        (slot,) = strategy.copies(slots[index].value)
        assert slot.device.endswith("CPU:1")


def test_updates_go_through_the_hook() -> None:
    updated: list[int] = []

    class Noting(Owned):
        def update_variable(self, variable: Any, copies: Any, update: Any) -> Any:
            updated.append(id(variable))
            return super().update_variable(variable, copies, update)

    model = tfd.distribute(lambda: build("sgd"), Noting(2))
    updated.clear()
    train(model, epochs=1, and_test=False)
    inner = model.keras_model
    written = [*inner.variables, *inner.optimizer.variables, *inner.metrics_variables]
    assert [v.path for v in written if id(v.value) not in updated] == []
    # Set to zero first, and to what replicas counted in the end.
    assert [updated.count(id(v.value)) for v in inner.metrics_variables] == [2, 2, 2, 2]


@pytest.mark.long
def test_keras_s_own_fit_does_what_it_does_under_mirrored() -> None:
    def trained(strategy: Any) -> Any:
        with strategy.scope():
            model = build("sgd")
        return train(model, epochs=1, and_test=False)

    operations = tf.distribute.ReductionToOneDevice()
    mirrored = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], cross_device_ops=operations)
    expected = trained(mirrored)
    for cls in (StrategyTemplate, Owned):
        assert_equal(trained(cls(2)), expected, 2e-6)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # in Keras
def test_saved_and_gone_on_with(tmp_path: Path) -> None:
    """One epoch under one strategy, the next under another; the model is plain Keras's."""
    plain = build()
    plain.run_eagerly = True  # few small steps take less time than making a graph of one
    train(plain, epochs=1, and_test=False)
    _, expected = train(plain, epochs=1)
    first = tfd.distribute(build, Mixed(3))
    train(first, epochs=1, and_test=False)
    first.save_checkpoint(str(tmp_path / "checkpoint"))
    second = tfd.distribute(build, Owned(2))
    second.restore_checkpoint(str(tmp_path / "checkpoint"))
    _, variables = train(second, epochs=1)
    for ours, theirs in zip(variables, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)
    second.save(str(tmp_path / "model.keras"))
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(
        loaded.predict([ROWS, IDS], verbose=0), variables[-1], rtol=0, atol=1e-6
    )
    second.export(str(tmp_path / "export"))
    exported = tf.saved_model.load(str(tmp_path / "export"))
    np.testing.assert_allclose(
        exported.serve([ROWS, IDS.astype("int32")]), variables[-1], rtol=0, atol=1e-6
    )


def test_a_checkpoint_holds_what_is_read(tmp_path: Path) -> None:
    model = tfd.distribute(build, ReadAsMean(2))
    bias = model.keras_model.layers[-1].bias
    for copy, value in zip(model.strategy.copies(bias.value), (1.0, 3.0), strict=True):
        copy.assign([value])
    model.save_checkpoint(str(tmp_path / "checkpoint"))
    other = tfd.distribute(build, StrategyTemplate(2))
    other.restore_checkpoint(str(tmp_path / "checkpoint"))
    assert other.keras_model.layers[-1].bias.numpy().tolist() == [2]


@pytest.fixture
def table_as_before() -> Iterator[None]:
    before = dict(registry._TABLE)
    yield
    registry._TABLE.clear()
    registry._TABLE.update(before)


def test_registered_under_a_name(table_as_before: None) -> None:
    tfd.register_strategy("pairwise", Pairwise, "sums pairs first")
    strategy = tfd.create_strategy("pairwise", devices=["CPU:1", "CPU:3"])
    assert type(strategy) is Pairwise
    text = str(tfd.explain(strategy))
    assert "strategy     pairwise (Pairwise)" in text
    assert "replicas     2 in sync" in text
    assert "devices      CPU:1, CPU:3" in text
    with pytest.raises(tfd.StrategyError, match=r"devices of Pairwise must be .*, got GPU:0"):
        tfd.create_strategy("pairwise", devices=["GPU:0"])
