"""Variables and slots of Keras models, learned without allocating them."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np
import pytest

import tfdist_ext as tfd
from tfdist_ext.placement import PlacementError
from tfdist_ext.placement.live.learning import learn_specs

pytestmark = pytest.mark.usefixtures("four_cpus")


def recommender(rows: int = 1000) -> keras.Model:
    ids = keras.Input([1], dtype="int32")
    rows_of_ids = keras.layers.Embedding(rows, 64)(ids)
    hidden = keras.layers.Dense(8)(keras.layers.Flatten()(rows_of_ids))
    hidden = keras.layers.Dropout(0.1)(keras.layers.BatchNormalization()(hidden))
    model = keras.Model(ids, keras.layers.Dense(1)(hidden))
    model.compile(optimizer="adam", loss="mse")
    return model


def resident_kib() -> int:
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])


def test_variables_are_those_of_the_real_model() -> None:
    specs = learn_specs(recommender)
    keras.utils.clear_session()
    model = recommender()
    model.optimizer.build(model.trainable_variables)
    learned = {(spec.path, spec.shape, spec.dtype, spec.trainable) for spec in specs}
    trainable = {id(variable) for variable in model.trainable_variables}
    counters = model.optimizer.variables[:2]
    assert learned == {
        (v.path, tuple(v.shape), v.dtype, id(v) in trainable) for v in [*model.variables, *counters]
    }
    real = sum(
        int(np.prod(v.shape)) * np.dtype(v.dtype).itemsize
        for v in [*model.variables, *model.optimizer.variables]
    )
    assert sum(spec.bytes for spec in specs) == real


def test_two_hundred_gigabytes_are_planned_without_memory() -> None:
    learn_specs(recommender)
    before = resident_kib()
    plan = tfd.plan_placement(lambda: recommender(800_000_000), ps=16, budget="40GiB")
    assert resident_kib() - before < 50 * 1024
    assert sum(plan.bytes_by_task) > 3 * 800_000_000 * 64 * 4
    assert plan.imbalance <= 1.01
    assert plan.tasks_of("embedding/embeddings") == tuple(range(16))


@pytest.mark.parametrize(
    ("optimizer", "slots"),
    [
        ("sgd", 0),
        ("adam", 2),
        (lambda: keras.optimizers.AdamW(use_ema=True), 3),
        (lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()), 2),
    ],
    ids=["sgd", "adam", "ema", "loss scale"],
)
def test_slots_of_optimizers_are_counted(
    optimizer: str | Callable[[], keras.optimizers.Optimizer], slots: int
) -> None:
    optimizer = optimizer() if callable(optimizer) else optimizer
    specs = {spec.path: spec for spec in learn_specs(recommender, optimizer)}
    assert specs["embedding/embeddings"].slots == slots
    assert specs["batch_normalization/moving_mean"].slots == 0
    if isinstance(optimizer, keras.optimizers.Optimizer):
        assert not optimizer.built  # the user builds it


def test_an_existing_model_is_learned_and_left_alone() -> None:
    model = recommender()
    weights = [weight.copy() for weight in model.get_weights()]
    plan = tfd.plan_placement(model, ps=2)
    assert {spec.path for spec in plan.specs} >= {v.path for v in model.variables}
    assert plan.specs[0].slots == 2
    assert not model.optimizer.built
    assert all(map(np.array_equal, weights, model.get_weights()))


def test_learning_leaves_no_trace() -> None:
    keras.utils.clear_session()
    keras.utils.set_random_seed(3)
    expected = (random.random(), np.random.random(), keras.layers.Dense(1).name)
    keras.utils.clear_session()
    keras.utils.set_random_seed(3)
    learn_specs(recommender)
    assert (random.random(), np.random.random(), keras.layers.Dense(1).name) == expected
    recommender().predict(np.zeros([2, 1]), verbose=0)  # global generators work as before


def unbuilt() -> keras.Model:
    return keras.Sequential([keras.layers.Dense(3)])


def computes_with_values() -> keras.Model:
    model = recommender()
    model(np.zeros([1, 1]))
    return model


@pytest.mark.parametrize(
    ("builder", "optimizer", "parts"),
    [
        (unbuilt, None, ["has no variables, because", "keras.Input"]),
        (computes_with_values, None, ["called with variables without values", "built model"]),
        (lambda: 3, None, ["builds the model returned 3, not a keras.Model"]),
        (recommender, "adan", ["got 'adan'"]),
    ],
    ids=["unbuilt", "computes", "no model", "optimizer"],
)
def test_a_model_that_cannot_be_learned_is_refused(
    builder: object, optimizer: str | None, parts: list[str]
) -> None:
    with pytest.raises(PlacementError) as error:
        tfd.plan_placement(builder, ps=2, optimizer=optimizer)
    for part in parts:
        assert part in str(error.value)
