"""Each private name of Keras that the package uses is there and does what is used of it.

When a release of Keras moves one, the test that fails names it and says what it was for.
"""

from __future__ import annotations

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
