"""Variables in pieces over the devices of one machine: where they are, and what can be done."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from template_cases import ON_DEVICE, devices_of

import tfdist_ext as tfd
from tfdist_ext.placement.live.creating import is_partitioned
from tfdist_ext.strategies import PlacedStrategy, StrategyTemplate
from tfdist_ext.testing import assert_trains_like_one_device

SUM = tf.VariableAggregation.SUM
TABLE = np.arange(14, dtype="float32").reshape(7, 2)


def pieces_of(strategy: Any, variable: Any) -> list[tuple[str, int]]:
    """(device, rows) of each piece."""
    rows = [copy.shape.as_list()[0] if copy.shape.rank else 0 for copy in strategy.copies(variable)]
    return list(zip(devices_of(strategy, variable), rows, strict=True))


@pytest.fixture
def strategy() -> PlacedStrategy:
    return PlacedStrategy(["CPU:1", "CPU:2", "CPU:3"], {"table": "sharded"})


@pytest.fixture
def table(strategy: PlacedStrategy) -> Any:
    with strategy.scope():
        return tf.Variable(TABLE, name="table", aggregation=SUM)


def test_where_pieces_and_their_slots_are(strategy: Any, table: Any) -> None:
    with strategy.scope(), strategy.extended.colocate_vars_with(table):
        slot = tf.Variable(lambda: tf.ones([7, 5]), name="slot")
        counter = tf.Variable(0.0, name="counter")
    assert is_partitioned(table)
    assert pieces_of(strategy, table) == [("CPU:1", 3), ("CPU:2", 2), ("CPU:3", 2)]
    assert pieces_of(strategy, slot) == pieces_of(strategy, table)
    assert pieces_of(strategy, counter) == [("CPU:1", 0)]
    assert strategy.owner(table) == 0
    assert strategy.extended.variable_created_in_scope(slot)
    np.testing.assert_array_equal(table.numpy(), TABLE)
    np.testing.assert_array_equal(slot.numpy(), np.ones([7, 5]))


def test_reads_in_replicas(strategy: Any, table: Any) -> None:
    @tf.function
    def read() -> Any:
        ids = tf.constant([0, 3, 6])
        return tf.gather(table, ids), tf.nn.embedding_lookup(table, ids), table[2:4], 2 * table

    expected = (TABLE[[0, 3, 6]], TABLE[[0, 3, 6]], TABLE[2:4], 2 * TABLE)
    for values, right in zip(strategy.run(read), expected, strict=True):
        for value in strategy.experimental_local_results(values):
            np.testing.assert_array_equal(value, right)


@pytest.mark.parametrize("how", ["eager", "graph"])
def test_assignments(strategy: Any, table: Any, how: str) -> None:
    run = tf.function(autograph=False) if how == "graph" else lambda function: function
    add = lambda copy, value: copy.assign_add(value)  # noqa: E731

    def update() -> None:
        with strategy.scope():
            strategy.extended.update(table, add, args=(10 * tf.ones([7, 2]),))

    def outside() -> None:
        table.assign_sub(tf.ones([7, 2]))

    def in_replicas() -> None:
        strategy.run(lambda: table.assign_add(100 * tf.ones([7, 2])))

    for function in (outside, update, in_replicas):
        run(function)()
    np.testing.assert_array_equal(table.numpy(), TABLE + 309)
    table.assign(TABLE)
    np.testing.assert_array_equal(np.array(table), TABLE)


def test_gradients_by_pieces_in_a_custom_loop(strategy: Any, table: Any) -> None:
    def step() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.nn.embedding_lookup(table, [0, 0, 6]))
        context = tf.distribute.get_replica_context()
        return context.all_reduce("SUM", [*tape.gradient(loss, table.variables)][::2])

    first, last = (strategy.experimental_local_results(value)[0] for value in strategy.run(step))
    np.testing.assert_array_equal(tf.convert_to_tensor(first), [[6, 6], [0, 0], [0, 0]])
    np.testing.assert_array_equal(tf.convert_to_tensor(last), [[0, 0], [3, 3]])


def build(optimizer: str = "Adam") -> keras.Model:
    keras.utils.set_random_seed(1)
    layers = keras.layers
    ids = keras.Input([3], dtype="int32")
    hidden = layers.Flatten()(layers.Embedding(12, 4, name="users")(ids))
    model = keras.Model(ids, layers.Dense(2, name="head")(hidden))
    model.compile(getattr(keras.optimizers, optimizer)(), "mse")
    return model


IDS = np.random.default_rng(1).integers(0, 12, (36, 3))
RATINGS = np.random.default_rng(2).normal(size=(36, 2)).astype("float32")
RULES = {"users/.*": "sharded(3)", "head/kernel": "sharded(2)"}


def trained(strategy: Any, optimizer: str = "Adam") -> Any:
    model = tfd.distribute(lambda: build(optimizer), strategy)
    model.fit(IDS, RATINGS, batch_size=12, shuffle=False, verbose=0)
    return model


@pytest.mark.parametrize(("optimizer", "by_piece"), [("SGD", True), ("Lamb", False)])
def test_an_update_is_computed_once_where_the_piece_is(
    optimizer: str, by_piece: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[tuple[int, str]] = set()
    kind = getattr(keras.optimizers, optimizer)
    original = kind.update_step

    def noting(self: Any, gradient: Any, variable: Any, rate: Any) -> None:
        rows = tf.convert_to_tensor(variable).shape[0]
        seen.add((rows, tf.zeros([]).device.removeprefix(ON_DEVICE)))
        original(self, gradient, variable, rate)

    monkeypatch.setattr(kind, "update_step", noting)
    trained(PlacedStrategy(3, RULES), optimizer)
    pieces = {(4, "CPU:0"), (4, "CPU:1"), (4, "CPU:2"), (6, "CPU:0"), (6, "CPU:1")}
    whole = {(12, "CPU:0")}
    updates = {(rows, device) for rows, device in seen if device}  # a trial has no device
    assert updates - {(2, "CPU:0")} == (pieces if by_piece else whole)


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # in Keras
def test_what_is_read_saved_and_assigned(tmp_path: Path) -> None:
    model = trained(PlacedStrategy(3, RULES))
    inner = model.keras_model
    model.save(tmp_path / "model.keras")
    inner.save_weights(tmp_path / "only.weights.h5")
    model.export(tmp_path / "exported", verbose=False)
    plain = keras.models.load_model(tmp_path / "model.keras")
    for ours, theirs in zip(
        [*inner.weights, *inner.optimizer.variables],
        [*plain.weights, *plain.optimizer.variables],
        strict=True,
    ):
        np.testing.assert_array_equal(ours.numpy(), theirs.numpy())
    exported = tf.saved_model.load(str(tmp_path / "exported"))
    np.testing.assert_allclose(
        exported.serve(tf.constant(IDS, tf.int32)), model.predict(IDS, verbose=0), atol=1e-6
    )
    again = trained(PlacedStrategy(2, {"users/.*": "sharded"}))
    again.keras_model.load_weights(tmp_path / "only.weights.h5")
    for ours, theirs in zip(again.keras_model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    again.keras_model.set_weights([2 * value for value in plain.get_weights()])
    users = again.keras_model.get_layer("users").embeddings
    np.testing.assert_array_equal(users.numpy(), 2 * plain.get_layer("users").embeddings.numpy())


def test_tensorflow_s_checkpoints(tmp_path: Path) -> None:
    """Of a variable, before and after it is created, and of a Keras model; there and back."""

    def made(strategy: Any, scale: float) -> Any:
        module = tf.Module()
        with strategy.scope():
            module.variable = tf.Variable(scale * TABLE, name="users/variable")
        module.model = tfd.distribute(build, strategy).keras_model
        module.model.set_weights([scale * value for value in module.model.get_weights()])
        return module

    source, other = PlacedStrategy(3, RULES), PlacedStrategy(2, {"users/.*": "sharded"})
    for number, (first, second) in enumerate(((source, other), (other, source))):
        saved, restored = made(first, 3.0), made(second, 5.0)
        path = tf.train.Checkpoint(saved).save(str(tmp_path / str(number)))
        tf.train.Checkpoint(restored).restore(path).assert_existing_objects_matched()
        later = tf.Module()
        tf.train.Checkpoint(later).restore(path).expect_partial()
        with second.scope():
            later.variable = tf.Variable(0 * TABLE, name="users/variable")
        np.testing.assert_array_equal(restored.variable.numpy(), 3 * TABLE)
        np.testing.assert_array_equal(later.variable.numpy(), 3 * TABLE)
        for one, two in zip(saved.model.get_weights(), restored.model.get_weights(), strict=True):
            np.testing.assert_array_equal(one, two)


def test_a_step_moves_rows() -> None:
    """No tensor of a shard's size is in its graph, from the lookup to the update."""
    rows = 600

    def lookup() -> keras.Model:
        ids = keras.Input([3], dtype="int32")
        model = keras.Model(ids, keras.layers.Embedding(rows, 2, name="users")(ids))
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    strategy = PlacedStrategy(["CPU:1", "CPU:2"], {"users/.*": "sharded"})
    model = tfd.distribute(lookup, strategy)
    model.fit(IDS, np.zeros([36, 3, 2]), batch_size=12, verbose=0)
    program = model._tfdist_ext.loop("train").program
    (step,) = program._executions[True, False]._list_all_concrete_functions()
    graphs = [step.graph, *(function.graph for function in step.graph._functions.values())]
    sizes = [
        tensor.shape.num_elements()
        for graph in graphs
        for operation in graph.get_operations()
        for tensor in operation.outputs
        if tensor.dtype == tf.float32 and tensor.shape.is_fully_defined()
    ]
    assert len(graphs) > 2
    assert 1 < max(sizes) < rows


def test_loops_over_pieces() -> None:
    def looping() -> keras.Model:
        keras.utils.set_random_seed(1)
        layers = keras.layers
        ids = keras.Input([3], dtype="int32")
        embedded = layers.Embedding(12, 4, mask_zero=True, name="words")(ids)
        hidden = layers.GRU(6, reset_after=False, name="gru")(embedded)
        model = keras.Model(ids, layers.Dense(2, name="head")(hidden))
        model.compile("adam", "mse")
        return model

    strategy = PlacedStrategy(3, {"words/.*": "sharded", "gru/.*kernel": "sharded(2)"})
    fit = {"batch_size": 12, "epochs": 2}
    assert_trains_like_one_device(looping, (IDS, RATINGS), strategy, tolerance=1e-6, **fit)


def test_a_custom_strategy_cuts() -> None:
    """Over other devices than those of its replicas."""
    devices = ["CPU:2", "CPU:3", "CPU:0"]

    class InPieces(StrategyTemplate):
        def create_variable(self, spec: Any, create: Any, beside: Any = None) -> Any:
            return create(devices, in_pieces=True)

    strategy = InPieces(2)
    with strategy.scope():
        variable = tf.Variable(TABLE)
        with pytest.raises(tfd.StrategyError, match=r"of shape \[2, 5\] into 3 pieces"):
            tf.Variable(tf.zeros([2, 5]))
    assert pieces_of(strategy, variable) == [("CPU:2", 3), ("CPU:3", 2), ("CPU:0", 2)]
    np.testing.assert_array_equal(variable.numpy(), TABLE)
