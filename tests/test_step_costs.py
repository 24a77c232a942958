"""tfd.plan_workers: what it measures of a model's step, and which arguments it refuses."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist_ext as tfd

pytestmark = pytest.mark.usefixtures("four_cpus")

ROWS = 16
IDS, LABELS = np.arange(40 * 3).reshape(40, 3) % 50, np.arange(40) % 2


def build() -> keras.Model:
    """A table of 50 x 4 and a kernel of 12 x 2, with Adam."""
    ids = keras.Input([3], dtype="int32")
    rows = keras.layers.Flatten()(keras.layers.Embedding(50, 4)(ids))
    model = keras.Model(ids, keras.layers.Dense(2)(keras.layers.BatchNormalization()(rows)))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def data() -> tuple[np.ndarray, np.ndarray]:
    return IDS, LABELS


DENSE = 4 * (12 * 2 + 2 + 2 * 12)
TABLE = 4 * 50 * 4


def test_a_step_is_timed_and_its_bytes_are_counted() -> None:
    plan = tfd.plan_workers(build, data, workers=[2, 1, 2], network="1Gbit", batch_size=ROWS)
    step = plan.step
    assert plan.workers == (1, 2)
    assert 0 <= step.fixed_seconds <= step.seconds < 1
    assert step.rows == ROWS
    assert (step.dense_bytes, step.trained_bytes) == (DENSE, DENSE + TABLE)
    assert (step.table_ids, step.table_values) == (3 * ROWS, 3 * ROWS * 4)
    assert step.slot_bytes == 2 * (DENSE + TABLE)
    assert step.other_bytes >= 4 * 2 * 12  # moving statistics
    assert f"{3 * ROWS} rows of tables" in str(plan)


@pytest.mark.parametrize("given", [data, (IDS, LABELS, np.ones(40)), "dataset"])
def test_all_kinds_of_data(given: Any) -> None:
    if given == "dataset":
        given = tf.data.Dataset.from_tensor_slices((IDS, LABELS)).batch(ROWS)
    plan = tfd.plan_workers(build, given, step_seconds="350ms", batch_size=ROWS)
    assert plan.step.seconds == 0.35
    assert (plan.step.rows, plan.step.table_ids) == (ROWS, 3 * ROWS)


def test_scaled_losses_and_own_steps() -> None:
    def scaled() -> keras.Model:
        model = build()
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
        model.compile(optimizer, "mse")
        return model

    class Own(keras.Model):
        def train_step(self, data: Any) -> dict[str, Any]:
            return {"loss": 0.0}

    def own() -> keras.Model:
        ids = keras.Input([3])
        model = Own(ids, keras.layers.Dense(2)(ids))
        model.compile("sgd", "mse")
        return model

    both = (IDS, np.zeros([40, 2]))
    plan = tfd.plan_workers(scaled, both, step_seconds=1, batch_size=ROWS)
    assert plan.step.table_ids == 3 * ROWS
    assert tfd.plan_workers(own, both, step_seconds=1).step.dense_bytes == 4 * (3 * 2 + 2)


def never() -> keras.Model:
    raise AssertionError("the model was built")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"network": "10"}, "network must be a rate with a unit"),
        ({"latency": -1}, "latency must be a time of at least 0"),
        ({"straggling": float("nan")}, "straggling must be"),
        ({"workers": []}, "workers must be numbers such as"),
        ({"workers": [0]}, "a number of workers must be an integer of at least 1"),
        ({"batch_size": 0}, "batch_size must be an integer of at least 1"),
        ({"step_seconds": 0}, "the time of a step above 0"),
        ({"data": None}, "needs data to time steps"),
        ({"builder": 3}, "it needs a function"),
    ],
)
def test_bad_arguments_are_named_before_the_model_is_built(
    arguments: dict[str, Any], said: str
) -> None:
    with pytest.raises(tfd.PlacementError, match=said):
        tfd.plan_workers(**{"builder": never, "data": data, **arguments})


def test_bad_models_and_data() -> None:
    with pytest.raises(tfd.PlacementError, match="must return a compiled Keras model"):
        tfd.plan_workers(lambda: keras.Sequential([keras.layers.Dense(1)]), data)
    with pytest.raises(tfd.PlacementError, match="is empty"):
        tfd.plan_workers(build, tf.data.Dataset.from_tensor_slices((IDS[:0], LABELS[:0])))
