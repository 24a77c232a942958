"""Each private name of Keras that the package uses is there and does what is used of it.

When a release of Keras moves one, the test that fails names it and says what it was for.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist_ext.private_names import PrivateNames
from tfdist_ext.training import _keras_private as kp
from tfdist_ext.training import _tf_private as tp
from tfdist_ext.training._tf_private import (
    function_graph,
    is_recording,
    is_stateful,
    read_by_tapes,
    recorded_operations,
    recording_operations,
)
from tfdist_ext.training.steps.replaced import functions_in_place, step_targets, substitutes

TRAINING = Path(kp.__file__).parent


def small_model() -> keras.Model:
    inner = keras.Sequential([keras.layers.Dense(2)], name="inner")
    model = keras.Sequential([keras.Input((3,)), inner, keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=["mae"])
    return model


@pytest.mark.parametrize("names", [kp.NAMES, tp.NAMES])
def test_names_in_modules(names: PrivateNames) -> None:
    for name in names.uses:
        assert names(name) is not None


@pytest.mark.parametrize("replaced", kp.REPLACED, ids=str)
def test_what_is_replaced_in_steps_is_there(replaced: kp.Replaced) -> None:
    owner, name = replaced.place()
    assert hasattr(owner, name), f"Keras {keras.__version__} moved {replaced}"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("_symbolic_build", "metrics and optimizer are built before the first step"),
        ("_flatten_layers", "layers inside of layers"),
        ("_compile_config", "what compile was called with"),
        ("_compile_metrics", "the metrics given to compile"),
        ("_flatten_metrics_in_order", "the order in which evaluate returns"),
        ("_initial_epoch", "the epoch that BackupAndRestore found"),
    ],
)
def test_names_of_models(name: str, why: str) -> None:
    assert hasattr(small_model(), name), f"Keras {keras.__version__} moved Model.{name}: {why}"


def test_links_of_operations() -> None:
    x = keras.Input((3,))
    once = keras.layers.Dense(3, name="once")
    model = keras.Model(x, once(once(x)) + 1.0)
    links = {o.name: [before.name for before in kp.inputs_from(o)] for o in model.operations}
    assert links[model.layers[0].name] == []
    assert links["once"] == [model.layers[0].name, "once"]


def test_variables() -> None:
    variable = keras.Variable(np.float32(1.0))
    assert isinstance(kp.raw_value(variable), tf.Variable)
    with keras.StatelessScope([(variable, 2.0)]):
        assert float(kp.raw_value(variable)) == 1.0


def test_array_adapters() -> None:
    x = np.arange(10.0, dtype="float32")[:, None]
    parts, rows, batch = kp.array_parts(kp.get_data_adapter(x, x + 1, batch_size=4))
    assert (rows, batch) == (10, 4)
    first, second = kp.take(parts, tf.constant([7, 2]))
    assert first[:, 0].numpy().tolist() == [7, 2]
    assert second[:, 0].numpy().tolist() == [8, 3]
    sparse = kp.get_data_adapter(tf.sparse.from_dense(x), x, batch_size=4)
    (taken, _) = kp.take(kp.array_parts(sparse)[0], tf.constant([7]))
    assert tf.sparse.to_dense(taken).numpy().tolist() == [[7.0]]
    (kept, _, _), (held, _, _) = kp.train_validation_split((x, x, None), validation_split=0.3)
    assert (len(kept), len(held)) == (7, 3)
    assert kp.is_of_arrays(kp.get_data_adapter(x))
    assert not kp.is_of_arrays(kp.get_data_adapter(tf.data.Dataset.from_tensors(x)))


def test_batches_of_a_py_dataset() -> None:
    class Two(keras.utils.PyDataset):
        num_batches = 2

        def __getitem__(self, index):
            return np.full((3, 1), index), np.zeros(3)

    adapter = kp.get_data_adapter(Two(), class_weight={0: 0.5})
    batches = list(kp.batches_of(adapter))
    assert [batch[0][0, 0] for batch in batches] == [0, 1]
    assert batches[0][2].tolist() == [0.5] * 3


def test_models() -> None:
    model = small_model()
    names = {layer.name for layer in kp.flat_layers(model)}
    assert {"inner", model.layers[0].layers[0].name} < names
    assert kp.flat_layers(model)[0] is model
    assert [layer for layer in kp.inner_layers(model) if layer.weights] == model.layers
    assert kp.inner_layers(model.layers[0])[-1:] == model.layers[0].layers
    assert kp.is_graph_of_layers(model)
    kp.symbolic_build(model, (keras.KerasTensor((None, 3)), keras.KerasTensor((None, 1))))
    assert model.optimizer.built
    assert [metric.name for metric in kp.metrics_in_use(model)] == []
    arguments = kp.compile_arguments(model)
    assert arguments["loss"] == "mse"
    assert arguments["optimizer"] is model.optimizer
    assert set(arguments) <= set(inspect.signature(keras.Model.compile).parameters)
    assert kp.metrics_in_order(model, {"mae": 2.0, "loss": 1.0}) == [1.0, 2.0]
    mine = keras.metrics.MeanSquaredError()
    model.compile("sgd", "mse", metrics=[mine], weighted_metrics=["mae"])
    assert kp.metrics_in_use(model) == [mine]
    assert kp.restored_epoch(model) is None
    kp.set_restored_epoch(model, 3)
    assert kp.restored_epoch(model) == 3


def test_tensorboard_tells_whether_it_profiles() -> None:
    assert kp.traces_batches(keras.callbacks.TensorBoard("x", profile_batch=2))
    assert not kp.traces_batches(keras.callbacks.TensorBoard("x"))


def test_lambdas_are_trusted_in_the_scope_only() -> None:
    config = keras.layers.Lambda(lambda x: x * 2).get_config()
    with pytest.raises(ValueError, match="lambda"):
        keras.layers.Lambda.from_config(config, safe_mode=True)
    with kp.trusted():
        layer = keras.layers.Lambda.from_config(config)
    assert float(layer(tf.constant(2.0))) == 4.0


def test_optimizers() -> None:
    inner = keras.optimizers.SGD()
    outer = keras.optimizers.LossScaleOptimizer(inner)
    weights = [keras.Variable(np.ones(2))]
    outer.build(weights)
    assert kp.trained_by(outer) == kp.trained_by(inner) == weights
    other = tf.distribute.OneDeviceStrategy("CPU:0")
    mine = inner._distribution_strategy
    with kp.distribution_strategy_of([outer, inner], other):
        assert inner._distribution_strategy is outer._distribution_strategy is other
    assert inner._distribution_strategy is outer._distribution_strategy is mine


def test_random_numbers_without_a_seed() -> None:
    keras.utils.set_random_seed(3)
    generator = kp.global_seed_generator()
    state = generator.state.numpy().tolist()
    one = keras.random.normal((2,)).numpy()
    assert generator.state.numpy().tolist() != state
    generator.state.assign(state)
    np.testing.assert_array_equal(keras.random.normal((2,)).numpy(), one)


def test_what_a_weighted_mean_divides_by() -> None:
    def divisor(weights, mask):
        return kp.loss_weights(weights, mask, "mean_with_sample_weight", "float32")

    mask = tf.constant([[True, False], [True, True]])
    assert divisor(None, None) is None
    assert float(tf.reduce_sum(divisor(None, mask))) == 3
    assert float(tf.reduce_sum(divisor(np.array([[2.0, 2.0], [5.0, 1.0]]), mask))) == 8


def test_what_was_run_eagerly_is_recorded() -> None:
    noted: list[tuple[str, int]] = []

    @tf.function
    def double(x: Any) -> Any:
        return 2 * x

    def note(kind: str, inputs: Any, attributes: Any, outputs: Any) -> None:
        if kind == "PartitionedCall":
            name = attributes["f"].name
            assert [len(function_graph(None, name).inputs), len(outputs)] == [1, 1]
        noted.append((kind, len(inputs)))

    with recorded_operations(), recording_operations(note):
        double(tf.constant(1) + 1)
        tf.tile(tf.constant([1]), [3])
    tf.constant(1) + 1
    assert noted == [("AddV2", 2), ("PartitionedCall", 1), ("Tile", 2)]


def test_functions_of_graphs_stateful_operations_and_open_tapes() -> None:
    assert is_stateful("RandomUniform")
    assert not is_stateful("Range")
    assert not is_stateful("__inference_of_a_user_1")
    with tf.GradientTape():
        assert is_recording()
    assert not is_recording()

    @tf.function
    def outer(x: Any) -> Any:
        made = tf.function(lambda y: y + 1)(x).op
        inner = function_graph(made.graph, made.get_attr("f").name)
        assert len(inner.inputs) == len(inner.outputs) == 1
        return made.outputs[0]

    assert int(outer(tf.constant(1))) == 2


def test_steps_on_workers_reach_into_optimizers_and_lookups() -> None:
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.5))
    counter, rate = kp.step_variables(optimizer)
    assert counter is optimizer.inner_optimizer._iterations
    assert float(rate.numpy()) == 0.5
    schedule = keras.optimizers.schedules.ExponentialDecay(0.5, 1, 0.5)
    assert kp.step_variables(keras.optimizers.SGD(schedule))[1] is None

    known, stranger = keras.Variable([1.0]), tf.Variable([2.0])
    adam = keras.optimizers.Adam()
    adam.build([known])

    def key(original: Any, optimizer: Any, variable: Any) -> Any:
        return original(optimizer, kp.raw_value(known) if variable is stranger else variable)

    with functions_in_place(step_targets()), substitutes({"variable_key": key}):
        assert adam._get_variable_index(stranger) == 0
    with pytest.raises(KeyError):
        adam._get_variable_index(stranger)


def test_gradients_are_not_summed_again_by_an_optimizer_without_a_strategy() -> None:
    inner = keras.optimizers.SGD(1.0)
    outer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=1.0)
    weight = keras.Variable(np.zeros(1, "float32"))
    outer.build([weight])
    strategy = tf.distribute.get_strategy()

    @tf.function(autograph=False)
    def step() -> None:
        with kp.distribution_strategy_of([outer, inner], strategy):
            outer.apply([tf.ones(1)], [weight])

    operations = step.get_concrete_function().graph.get_operations()
    assert not [operation.name for operation in operations if operation.type == "IdentityN"]
    step()
    assert weight.numpy().tolist() == [-1.0]
    assert "_all_reduce_sum_gradients" not in {**vars(inner), **vars(outer)}


def test_tapes_watch_what_stands_in_for_a_variable() -> None:
    class StandIn:
        trainable = True
        handle = tf.constant(3.0)

    with tf.GradientTape() as tape:
        read_by_tapes(StandIn)
        square = StandIn.handle**2
    assert float(tape.gradient(square, StandIn.handle)) == 6.0


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("coordination_service", "whether workers have a common store"),
        ("set_config_key_value", "what workers tell each other"),
        ("get_config_key_value", "what workers tell each other"),
        ("delete_config_key_value", "what workers tell each other"),
        ("check_collective_ops_peer_health", "whether another worker is there"),
        ("abort_collective_ops", "ending a collective in which a worker is missing"),
    ],
)
def test_names_of_tensorflows_context(name: str, why: str) -> None:
    """What they do, real processes show: test_peers.py."""
    from tensorflow.python.eager import context

    assert hasattr(context.Context, name), f"TensorFlow {tf.__version__} moved {name}, for {why}"


def test_no_other_module_reaches_into_keras() -> None:
    for module in TRAINING.rglob("*.py"):
        if module.name != "_keras_private.py":
            assert not re.search(r"keras\.src|from keras\.", module.read_text()), module.name
