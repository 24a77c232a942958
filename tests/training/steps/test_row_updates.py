"""Updates of the rows of a batch, in place of whole tables: the numbers, and who may do it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from training_cases import RNG, mirrored, plain_fit, strategy_of, weights_of

import tfdist_ext as tfd
from tfdist_ext.training.steps import row_updates
from tfdist_ext.training.steps.row_updates import RowUpdates, way_of
from tfdist_ext.training.variables import default_strategy

ROWS = 30  # of which a batch uses some, often several times, and some are never used
IDS = RNG.integers(0, 20, (26, 5))
Y = RNG.normal(size=(26, 1)).astype("float32")
FIT: dict[str, Any] = {"batch_size": 10, "epochs": 2, "shuffle": False, "verbose": 0}
OPTIMIZERS = keras.optimizers


class SignOfMean(keras.optimizers.Optimizer):
    """An optimizer of a user, which computes element by element."""

    updates_by_row = True

    def build(self, variables: Any) -> None:
        super().build(variables)
        self.means = self.add_optimizer_variables(variables, "mean")

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        mean = self.means[self._get_variable_index(variable)]
        self.assign(mean, 0.9 * mean + gradient)
        self.assign_sub(variable, learning_rate * keras.ops.sign(mean))


# What leaves rows without a gradient as they are.
SAME = {
    "Adagrad": lambda: OPTIMIZERS.Adagrad(0.1),
    "clipnorm": lambda: OPTIMIZERS.Adagrad(0.1, clipnorm=0.05),
    "global_clipnorm": lambda: OPTIMIZERS.Adagrad(0.1, global_clipnorm=0.05),
    "EMA": lambda: OPTIMIZERS.Adagrad(0.1, use_ema=True, ema_overwrite_frequency=4),
    "loss scaling": lambda: OPTIMIZERS.LossScaleOptimizer(OPTIMIZERS.Adagrad(0.1)),
}
# What changes all rows in each step.
LAZY = {
    "Adam": lambda: OPTIMIZERS.Adam(0.1),
    "amsgrad": lambda: OPTIMIZERS.Adam(0.1, amsgrad=True),
    "AdamW": lambda: OPTIMIZERS.AdamW(0.1, weight_decay=0.1),
    "RMSprop": lambda: OPTIMIZERS.RMSprop(0.05, centered=True, momentum=0.5),
    "Nadam": lambda: OPTIMIZERS.Nadam(0.1),
    "Adamax": lambda: OPTIMIZERS.Adamax(0.1),
    "Ftrl": lambda: OPTIMIZERS.Ftrl(0.1),
    "momentum": lambda: OPTIMIZERS.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "Adadelta": lambda: OPTIMIZERS.Adadelta(0.1),
    "Adagrad that decays": lambda: OPTIMIZERS.Adagrad(0.1, weight_decay=0.1),
    "EMA": lambda: OPTIMIZERS.Adam(0.1, use_ema=True, clipnorm=0.5),
    "loss scaling": lambda: OPTIMIZERS.LossScaleOptimizer(OPTIMIZERS.Adam(0.1)),
    "of a user": lambda: SignOfMean(0.02),
}


def builder(optimizer: Callable[[], Any], **settings: Any) -> Callable[[], keras.Model]:
    def build() -> keras.Model:
        keras.utils.set_random_seed(1)
        ids = keras.Input((5,), dtype="int32")
        rows = keras.layers.Embedding(ROWS, 3, name="table")(ids)
        outputs = keras.layers.Dense(1)(keras.ops.tanh(keras.ops.sum(rows, axis=1)))
        model = keras.Model(ids, outputs)
        model.compile(optimizer(), "mse", **settings)
        return model

    return build


def trained(
    optimizer: Callable[[], Any],
    strategy: Any = None,
    *,
    jit_compile: bool = False,
    run_eagerly: bool = False,
    **options: Any,
) -> list[np.ndarray]:
    """The weights and the optimizer's variables after a training with lazy updates."""
    build = builder(optimizer, jit_compile=jit_compile, run_eagerly=run_eagerly)
    options = {"lazy_updates": True, **options}
    model = tfd.distribute(build, strategy or default_strategy(), **options)
    model.fit(IDS, Y, **FIT)
    return [*weights_of(model), *map(np.asarray, model.optimizer.variables)]


def assert_close(ours: list[np.ndarray], theirs: list[np.ndarray], tolerance: float = 1e-6) -> None:
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", SAME)
@pytest.mark.parametrize("replicas", [1, 3])
def test_where_no_number_changes_rows_are_updated_by_themselves(name: str, replicas: int) -> None:
    plain, _ = plain_fit(builder(SAME[name]), IDS, Y, **FIT)
    ours = trained(SAME[name], mirrored(replicas), lazy_updates=False)
    assert_close(ours, [*weights_of(plain), *map(np.asarray, plain.optimizer.variables)])


@pytest.mark.parametrize("name", LAZY)
def test_lazy_updates_are_those_of_one_device(name: str) -> None:
    one = trained(LAZY[name])
    assert_close(trained(LAZY[name], mirrored(3)), one, 1e-5)
    table = one[0]
    unused = np.setdiff1d(np.arange(ROWS), IDS)
    np.testing.assert_array_equal(table[unused], builder(LAZY[name])().get_weights()[0][unused])


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("central_storage", {}),
        ("placed", {"placement": {".*table.*": "sharded(2)"}}),
        ("placed", {"placement": {".*table.*": "device CPU:1"}}),
        ("mirrored", {"jit_compile": True}),
        ("mirrored", {"run_eagerly": True}),
        ("mirrored", {"one_trace": False}),
    ],
)
def test_lazy_updates_of_tables_in_other_places(name: str, options: dict[str, Any]) -> None:
    strategy = strategy_of(name)
    if placement := options.pop("placement", None):
        devices = ["CPU:0", "CPU:1"]
        strategy = tfd.create_strategy(name, devices=devices, placement=placement)
    assert_close(trained(LAZY["AdamW"], strategy, **options), trained(LAZY["AdamW"]), 1e-5)


@pytest.mark.parametrize("name", ["Adam", "AdamW", "RMSprop", "EMA", "loss scaling", "of a user"])
@pytest.mark.parametrize("placement", ["sharded(2)", "device CPU:1"])
def test_large_tables_are_updated_in_blocks_with_the_numbers_of_one_device(
    name: str, placement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_updates, "UPDATE_BLOCK_BYTES", 12)  # one row
    blocks: list[tf.Tensor] = []  # that were traced
    update_rows = RowUpdates._update_rows

    def counted(updates: RowUpdates, update: Any, table: Any, ids: tf.Tensor, *rest: Any) -> None:
        blocks.append(ids)
        update_rows(updates, update, table, ids, *rest)

    monkeypatch.setattr(RowUpdates, "_update_rows", counted)
    devices = ["CPU:0", "CPU:1"]
    strategy = tfd.create_strategy("placed", devices=devices, placement={".*table.*": placement})
    plain, _ = plain_fit(builder(LAZY[name]), IDS, Y, **FIT)
    ours = trained(LAZY[name], strategy, lazy_updates=False)
    assert_close(ours, [*weights_of(plain), *map(np.asarray, plain.optimizer.variables)], 1e-5)
    assert blocks


@pytest.mark.parametrize("replicas", [1, 2])
def test_lazy_adam_by_hand(replicas: int) -> None:
    """A table alone, whose gradient is known: 2 (row - target) / rows of the batch."""
    start = RNG.normal(size=(6, 2)).astype("float32")
    ids = np.array([0, 3, 3, 1, 5, 3, 0, 1])
    targets = RNG.normal(size=(8, 2)).astype("float32")

    def build() -> keras.Model:
        table = keras.layers.Embedding(6, 2)
        model = keras.Sequential([keras.Input((), dtype="int32"), table])
        table.embeddings.assign(start)
        model.compile(keras.optimizers.AdamW(0.1, weight_decay=0.5, epsilon=1e-7), "mse")
        return model

    model = tfd.distribute(build, mirrored(replicas), lazy_updates=True)
    model.fit(ids, targets, batch_size=4, epochs=3, shuffle=False, verbose=0)
    table, m, v, step = start.astype("float64"), np.zeros((6, 2)), np.zeros((6, 2)), 0
    for _ in range(3):
        for batch in (slice(0, 4), slice(4, 8)):
            step += 1
            gradient = np.zeros((6, 2))
            np.add.at(gradient, ids[batch], 2 * (table[ids[batch]] - targets[batch]) / 8)
            used = np.unique(ids[batch])
            table[used] -= 0.1 * 0.5 * table[used]
            m[used] += 0.1 * (gradient[used] - m[used])
            v[used] += 0.001 * (gradient[used] ** 2 - v[used])
            rate = 0.1 * np.sqrt(1 - 0.999**step) / (1 - 0.9**step)
            table[used] -= rate * m[used] / (np.sqrt(v[used]) + 1e-7)
    np.testing.assert_allclose(weights_of(model)[0], table, rtol=1e-4, atol=1e-5)
    assert int(model.optimizer.iterations) == 6


class OwnAdam(keras.optimizers.Adam):
    """An optimizer of a user, which does not say how it computes."""


class OwnSGD(keras.optimizers.SGD):
    """The same, without slots."""


@pytest.mark.parametrize(
    ("make", "way", "in_place", "lazy"),
    [
        (lambda: OPTIMIZERS.SGD(), "whole", "whole", "whole"),  # writes slices itself
        (lambda: OPTIMIZERS.SGD(weight_decay=0.1), "whole", "whole", "lazy rows"),
        (lambda: OPTIMIZERS.SGD(momentum=0.9), "whole", "blocks", "lazy rows"),
        (lambda: OPTIMIZERS.Adagrad(), "rows", "rows", "rows"),
        (lambda: OPTIMIZERS.Adagrad(weight_decay=0.1), "whole", "blocks", "lazy rows"),
        (lambda: OPTIMIZERS.Adam(), "whole", "blocks", "lazy rows"),
        (lambda: SignOfMean(0.1), "whole", "blocks", "lazy rows"),
        (lambda: OPTIMIZERS.Adafactor(), "whole", "whole", None),
        (lambda: OPTIMIZERS.Lamb(), "whole", "whole", None),
        (lambda: OwnAdam(), "whole", "whole", None),
        (lambda: OwnSGD(), "whole", "whole", None),
    ],
)
def test_how_an_optimizer_updates_tables(
    make: Any, way: str, in_place: str, lazy: str | None
) -> None:
    optimizer = make()
    assert way_of(optimizer, lazy=False, in_place=False) == way
    assert way_of(optimizer, lazy=False, in_place=True) == in_place
    if lazy is None:
        with pytest.raises(tfd.TrainingError, match=f"{type(optimizer).__name__} is not known"):
            way_of(optimizer, lazy=True, in_place=True)
    else:
        assert way_of(optimizer, lazy=True, in_place=True) == lazy


@pytest.mark.parametrize(
    ("optimizer", "why"),
    [
        (lambda: OPTIMIZERS.Lamb(0.1), r"Lamb is not known .* set updates_by_row = True"),
        (lambda: OPTIMIZERS.Adam(0.1, gradient_accumulation_steps=2), "gradient_accumulation_st"),
    ],
)
def test_what_needs_whole_tables_is_refused(optimizer: Any, why: str) -> None:
    with pytest.raises(tfd.TrainingError, match=why):
        trained(optimizer, mirrored(2))


def test_a_large_table_that_is_updated_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_updates, "_LARGE", ROWS * 3 * 4)
    with pytest.warns(UserWarning, match=r"all 30 rows of table.*lazy_updates=True"):
        trained(LAZY["Adam"], mirrored(2), lazy_updates=False)
    trained(SAME["Adagrad"], mirrored(2), lazy_updates=False)  # no warning


def test_verify_compares_lazy_updates_with_lazy_updates() -> None:
    result = tfd.verify(builder(LAZY["Adam"]), (IDS, Y), mirrored(3), lazy_updates=True)
    assert result.equal
    assert "lazy updates on one device" in str(result)
