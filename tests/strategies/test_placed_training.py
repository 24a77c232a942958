"""Keras models on PlacedStrategy: the numbers of one device, whatever the rules."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import tfdist_ext as tfd
from tfdist_ext.placement.live.creating import is_partitioned
from tfdist_ext.strategies import PlacedStrategy, StrategyTemplate

ROWS = np.random.default_rng(0).normal(size=(41, 5)).astype("float32")
IDS = np.random.default_rng(1).integers(0, 12, (41, 3))
LABELS = (ROWS.sum(axis=1, keepdims=True) > 0).astype("float32")
DATA = [ROWS, IDS]

OPTIMIZERS = {
    "SGD": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "AdamW, clipped, EMA": lambda: keras.optimizers.AdamW(
        0.01,
        weight_decay=0.1,
        global_clipnorm=0.3,
        use_ema=True,
        ema_momentum=0.8,
        ema_overwrite_frequency=3,
    ),
    "loss scaling": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(0.01, clipnorm=0.2), initial_scale=8.0, dynamic_growth_steps=3
    ),
    "Lamb, accumulating, EMA": lambda: keras.optimizers.Lamb(
        0.01, gradient_accumulation_steps=2, use_ema=True, ema_momentum=0.8
    ),
}
# To evaluate and predict is the same after any of them.
TESTED = ("SGD", "AdamW, clipped, EMA")
RULES = {
    "mirrored": {".*": "mirrored"},
    "owned": {".*": "owned"},
    "one device": {".*": "device CPU:2"},
    "sharded": {
        "table/.*": "sharded(3)",
        ".*kernel": "sharded(2)",
        "hidden/bias": "sharded",
        "norm/.*": "sharded(2)",
    },
    "mixed": {
        "table/.*": "device CPU:0",
        "hidden/kernel": "sharded(2)",
        "head/kernel": "owned",
        ".*bias": "mirrored",
    },
}


def build(optimizer: str = "AdamW, clipped, EMA") -> keras.Model:
    """A table, regularized weights and a synchronized BatchNormalization."""
    keras.utils.set_random_seed(1)
    layers = keras.layers
    rows, ids = keras.Input([5], name="rows"), keras.Input([3], dtype="int32", name="ids")
    embedded = layers.Flatten()(layers.Embedding(12, 4, name="table")(ids))
    regularizer = keras.regularizers.L2(0.05)
    hidden = layers.Dense(8, "tanh", kernel_regularizer=regularizer, name="hidden")(
        layers.Concatenate()([rows, embedded])
    )
    hidden = layers.BatchNormalization(synchronized=True, name="norm")(hidden)
    model = keras.Model([rows, ids], layers.Dense(1, "sigmoid", name="head")(hidden))
    model.compile(OPTIMIZERS[optimizer](), "binary_crossentropy", metrics=["accuracy"])
    model.optimizer.build(model.trainable_variables)
    return model


def eager(model: keras.Model) -> keras.Model:
    """On one device: few small steps take less time than making a graph of one."""
    model.run_eagerly = True
    return model


def train(
    model: Any, epochs: int = 2, *, tested: bool = True
) -> tuple[list[float], list[np.ndarray]]:
    """(all losses and metrics, all variables and predictions) of uneven batches of 12 rows."""
    fitted = model.fit(DATA, LABELS, batch_size=12, epochs=epochs, shuffle=False, verbose=0)
    logs = [value for name in sorted(fitted.history) for value in fitted.history[name]]
    inner = getattr(model, "keras_model", model)
    values = [v.numpy() for v in [*inner.weights, *inner.optimizer.variables]]
    if tested:
        logs += model.evaluate(DATA, LABELS, batch_size=12, verbose=0)
        values.append(model.predict(DATA, batch_size=12, verbose=0))
    return logs, values


def assert_equal(one: Any, other: Any, tolerance: float = 1e-6) -> None:
    np.testing.assert_allclose(one[0], other[0], rtol=1e-5, atol=tolerance)
    for a, b in zip(one[1], other[1], strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance)


@functools.cache
def one_device(name: str) -> Any:
    return train(eager(build(name)), tested=name in TESTED)


def assert_copies_equal(model: Any) -> None:
    inner = model.keras_model
    for variable in [*inner.weights, *inner.optimizer.variables]:
        if is_partitioned(variable.value):
            continue  # one copy, in pieces
        one, *others = [copy.numpy() for copy in model.strategy.copies(variable.value)]
        for other in others:
            np.testing.assert_array_equal(one, other)


@pytest.mark.long("[mirrored]", "owned", "one device", "mixed")
@pytest.mark.parametrize("rules", RULES)
def test_trained_as_on_one_device(rules: str) -> None:
    name = "AdamW, clipped, EMA"
    model = tfd.distribute(build, PlacedStrategy(3, RULES[rules]))
    assert_equal(train(model), one_device(name))
    assert_copies_equal(model)


@pytest.mark.long("[loss scaling-sharded", "EMA-mixed", "EMA-sharded")
@pytest.mark.parametrize(("rules", "replicas"), [("sharded", 4), ("mixed", 2)])
@pytest.mark.parametrize("optimizer", [name for name in OPTIMIZERS if name not in TESTED])
def test_with_other_optimizers(optimizer: str, rules: str, replicas: int) -> None:
    model = tfd.distribute(lambda: build(optimizer), PlacedStrategy(replicas, RULES[rules]))
    assert_equal(train(model, tested=False), one_device(optimizer))
    assert_copies_equal(model)


@pytest.mark.long("rules0")
@pytest.mark.parametrize("rules", [{}, {"table/.*": "sharded", "hidden/kernel": "sharded(2)"}])
def test_in_eager_steps(rules: Any) -> None:
    model = tfd.distribute(lambda: eager(build("SGD")), PlacedStrategy(2, rules, owned_from=64))
    assert_equal(train(model), one_device("SGD"))


@pytest.mark.long("sharded")
@pytest.mark.parametrize(
    ("rules", "policy"), [("sharded", "mixed_bfloat16"), ("mixed", "mixed_float16")]
)
def test_mixed_precision(rules: str, policy: str) -> None:
    """As near to one device as half precision is, and every copy the same."""

    def half() -> keras.Model:
        before = keras.config.dtype_policy()
        keras.config.set_dtype_policy(policy)
        try:
            return build("SGD")
        finally:
            keras.config.set_dtype_policy(before)

    expected = train(eager(half()), tested=False)
    model = tfd.distribute(half, PlacedStrategy(3, RULES[rules]))
    one_row = 1.01 / 41  # of the accuracy: its score may round to the other side
    np.testing.assert_allclose(train(model, tested=False)[0], expected[0], rtol=1e-5, atol=one_row)
    assert_copies_equal(model)


def test_slots_are_with_the_owner_alone_and_balanced() -> None:
    def equal_layers() -> keras.Model:
        layers = [keras.layers.Dense(16, use_bias=False) for _ in range(8)]
        model = keras.Sequential([keras.Input([16]), *layers])
        model.compile("adam", "mse")
        model.optimizer.build(model.trainable_variables)
        return model

    strategy = PlacedStrategy(4, owned_from=1)
    model = tfd.distribute(equal_layers, strategy).keras_model
    assert strategy.placement_plan is not None
    held = dict.fromkeys(strategy.devices, 0)
    optimizer = model.optimizer
    for variable, *slots in zip(
        model.trainable_variables, optimizer._momentums, optimizer._velocities, strict=True
    ):
        owner = strategy.devices[strategy.owner(variable.value)]
        assert strategy.placement_plan.owner_of(variable.path) == strategy.owner(variable.value)
        for slot in slots:
            (copy,) = strategy.copies(slot.value)
            assert copy.device.endswith(owner)
            held[owner] += copy.shape.num_elements() * 4
    assert list(held.values()) == [2 * 2 * 16 * 16 * 4] * 4


def test_gradients_go_to_the_owner_alone() -> None:
    asked: list[tuple[list[int], list[str]]] = []

    class Noting(PlacedStrategy):
        def reduce_values(self, op: Any, values: Any, devices: Any) -> Any:
            asked.append((values[0].shape.as_list(), [name[-5:] for name in devices]))
            return super().reduce_values(op, values, devices)

    strategy = Noting(3, {"hidden/kernel": "owned", "table/.*": "device CPU:2"})
    model = tfd.distribute(lambda: build("SGD"), strategy)
    asked.clear()
    train(model, epochs=1, tested=False)
    owner = strategy.devices[strategy.owner(model.keras_model.get_layer("hidden").kernel.value)]
    assert {tuple(devices) for shape, devices in asked if shape == [17, 8]} == {(owner,)}
    assert {tuple(devices) for shape, devices in asked if shape == [12, 4]} == {("CPU:2",)}


@pytest.mark.long("sharded")
@pytest.mark.parametrize("rules", ["sharded", "mixed"])
def test_checkpoints_to_and_from_mirrored(rules: str, tmp_path: Path) -> None:
    """One epoch under one strategy, the next under another."""
    plain = eager(build())
    train(plain, epochs=1, tested=False)
    expected = train(plain, epochs=1, tested=False)
    mirrored = tfd.distribute(build, tfd.create_strategy("mirrored", devices=2))
    start, middle = str(tmp_path / "start"), str(tmp_path / "middle")
    mirrored.save_checkpoint(start)
    placed = tfd.distribute(build, PlacedStrategy(3, RULES[rules]))
    for one, other in ((placed, mirrored), (mirrored, placed)):
        one.restore_checkpoint(start)
        train(one, epochs=1, tested=False)
        one.save_checkpoint(middle)
        other.restore_checkpoint(middle)
        assert_equal(train(other, epochs=1, tested=False), expected)


def test_keras_s_own_fit_does_what_it_does_on_the_template() -> None:
    def trained(strategy: Any) -> Any:
        with strategy.scope():
            model = build("SGD")
        fitted = model.fit(DATA, LABELS, batch_size=12, epochs=1, shuffle=False, verbose=0)
        return list(fitted.history["loss"]), [v.numpy() for v in model.weights]

    assert_equal(trained(PlacedStrategy(2, {".*": "owned"})), trained(StrategyTemplate(2)), 2e-6)


@pytest.mark.long
@pytest.mark.parametrize("rules", [{}, {".*": "device CPU:1"}])
def test_averages_of_weights_in_keras_s_own_fit(rules: Any) -> None:
    """Replicas write them: the one copy takes what the first replica has, as all have the same."""

    def trained(strategy: Any) -> Any:
        with strategy.scope():
            keras.utils.set_random_seed(1)
            model = keras.Sequential([keras.Input([5]), keras.layers.Dense(1)])
            adam = keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.8)
            model.compile(adam, "mse")
        model.fit(ROWS[:36], LABELS[:36], batch_size=12, epochs=2, shuffle=False, verbose=0)
        return [0.0], [v.numpy() for v in [*model.weights, *model.optimizer.variables]]

    assert_equal(trained(PlacedStrategy(2, rules, owned_from=1)), trained(StrategyTemplate(2)))


def test_an_existing_model_and_a_rule_that_matches_nothing() -> None:
    original = build("SGD")
    rules = {"hidden/kernel": "owned", "table/.*": "sharded"}
    model = tfd.distribute(original, PlacedStrategy(2, rules))
    plan = model.strategy.placement_plan
    assert plan is not None
    assert plan.owner_of("hidden/kernel") is not None
    for ours, theirs in zip(model.keras_model.weights, original.weights, strict=True):
        np.testing.assert_array_equal(ours.numpy(), theirs.numpy())
    assert_equal(train(model, tested=False), train(eager(original), tested=False))
    with pytest.raises(tfd.PlacementError, match=r"hiden/kernel.* matches no variable"):
        tfd.distribute(build, PlacedStrategy(2, {"hiden/kernel": "owned"}))


@pytest.mark.parametrize("rules", [{}, {".*dense/kernel": "sharded"}])
def test_a_model_that_is_built_by_its_data(rules: Any) -> None:
    """Its variables are not known before, and are owned or cut as they come."""

    def unbuilt() -> keras.Model:
        keras.utils.set_random_seed(1)
        hidden, output = keras.layers.Dense(4, name="dense"), keras.layers.Dense(1, name="output")
        model = keras.Sequential([hidden, output])
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    plain = eager(unbuilt())
    plain.fit(ROWS, LABELS, batch_size=12, epochs=1, shuffle=False, verbose=0)
    model = tfd.distribute(unbuilt, PlacedStrategy(2, rules, owned_from=1))
    model.fit(ROWS, LABELS, batch_size=12, epochs=1, shuffle=False, verbose=0)
    assert model.strategy.placement_plan is None
    assert {model.strategy.owner(v.value) for v in model.keras_model.weights} == {0, 1}
    assert is_partitioned(model.keras_model.layers[0].kernel.value) == bool(rules)
    for ours, theirs in zip(model.keras_model.weights, plain.weights, strict=True):
        np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=0, atol=1e-6)
