"""One trace of a step for all replicas: what Python sees of it, and the numbers of one device."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from training_cases import (
    X,
    Y,
    assert_same_history,
    assert_same_weights,
    assert_trains_as_keras,
    compiled,
    distributed_fit,
    mirrored,
    plain_fit,
    stack,
    strategy_of,
)

import tfdist_ext as tfd
from tfdist_ext.training.synchronous.model_step import trace_for_each

FIT = {"batch_size": 22, "epochs": 2}  # 64 rows: the last batch is uneven
CALLS: list[str] = []
ONE_TRACE = "train: one trace for the 3 replicas of this task"
ONLY_CPUS = "one_trace='auto' shares a trace on CPUs only, and devices are"


@keras.saving.register_keras_serializable("test_one_trace")
class Noted(layers.Dense):
    """Notes the calls that Python makes."""

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        CALLS.append(self.name)
        return super().call(inputs)


def of_layers(*between: Callable[[], layers.Layer], optimizer: Any = "adam") -> Any:
    def build() -> keras.Model:
        made = [make() for make in between]
        model = stack(Noted(4, activation="tanh"), *made, layers.Dense(1, "sigmoid"))
        return compiled(model, optimizer, "binary_crossentropy", metrics=["accuracy"])

    return build


def statistics() -> layers.Layer:
    return layers.BatchNormalization(synchronized=True)


def test_python_runs_a_step_once() -> None:
    model, _ = distributed_fit(of_layers(), X, Y, strategy=mirrored(4), epochs=0)
    CALLS.clear()
    model.fit(X, Y, verbose=0, **FIT)
    assert len(CALLS) == 1
    model.predict(X, verbose=0)
    assert len(CALLS) == 2


class InACond(layers.Dense):
    """Keeps a moving value that it writes in an inner graph, and reads again."""

    def build(self, shape: Any) -> None:
        super().build(shape)
        self.scale = self.add_weight(name="scale", initializer="ones", trainable=False)

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        outputs = super().call(inputs) * self.scale
        mean = tf.reduce_mean(outputs)

        def follow() -> tf.Tensor:
            self.scale.assign(0.9 * self.scale + 0.1)
            return self.scale * outputs

        return tf.cond(mean > -9.0, follow, lambda: outputs)


class InTable(layers.Layer):
    """Looks numbers up in a table of TensorFlow's, which all replicas share."""

    def __init__(self, **named: Any):
        super().__init__(**named)
        keys, values = tf.constant([0, 1], tf.int64), tf.constant([0.5, 2.0])
        pairs = tf.lookup.KeyValueTensorInitializer(keys, values)
        self.table = tf.lookup.StaticHashTable(pairs, 1.0)

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        return inputs * self.table.lookup(tf.cast(inputs > 0, tf.int64))


class InPython(layers.Layer):
    """Computes in Python, out of the graph."""

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        made = tf.numpy_function(lambda x: x * np.float32(2), [inputs], tf.float32)
        return inputs + tf.stop_gradient(tf.ensure_shape(made, inputs.shape))


class InALoop(layers.Layer):
    """A loop with a gradient, which gives the loop inputs that are made after it."""

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        return tf.while_loop(
            lambda i, _: i < 3, lambda i, x: (i + 1, tf.sin(x) * 1.5), [tf.constant(0), inputs]
        )[1]


@pytest.mark.parametrize(
    "between",
    [[InTable, InPython], [statistics, InALoop, statistics], [statistics, lambda: InACond(3)]],
    ids=["table and Python", "loop between sums over replicas", "variable written in a cond"],
)
def test_layers_of_all_kinds(between: Any) -> None:
    build = of_layers(*between)
    _, ours = assert_trains_as_keras(build, X, Y, strategy=mirrored(3), **FIT)
    assert tfd.explain(ours).steps == (ONE_TRACE,)


@pytest.mark.parametrize(
    ("devices", "one_trace", "why"),
    [
        (["CPU:0", "CPU:1"], True, None),
        (["GPU:0", "GPU:1"], "auto", f"{ONLY_CPUS} GPU"),
        (["GPU:0", "CPU:0"], "auto", f"{ONLY_CPUS} CPU, GPU"),
        (["GPU:0", "GPU:1"], True, None),
        (["TPU:0", "TPU:1"], "auto", "a TPU compiles the step"),
        (["TPU:0", "TPU:1"], True, "a TPU compiles the step"),
        ([], "auto", "there is one replica"),  # the default strategy
    ],
)
def test_which_replicas_share_a_trace(devices: list[str], one_trace: Any, why: str | None) -> None:
    count = max(1, len(devices))
    kinds = sorted({device[:3] for device in devices})
    on: Any = SimpleNamespace(
        device_types=kinds, multi_worker=False, local_replicas=count, strategy=None
    )
    assert trace_for_each(on, one_trace, jit_compile=False) == why


def test_one_trace_is_turned_off() -> None:
    """TensorFlow traces each replica; the numbers are those of one device."""
    build = of_layers(statistics)
    plain, expected = plain_fit(build, X, Y, **FIT)
    ours, history = distributed_fit(build, X, Y, strategy=mirrored(2), one_trace=False, **FIT)
    assert_same_weights(plain, ours)
    assert_same_history(expected, history)
    assert tfd.explain(ours).steps == ("train: a trace for each of 2 replicas: one_trace=False",)
    with pytest.raises(tfd.TrainingError, match="one_trace must be 'auto', True or False, got 2"):
        tfd.distribute(build, mirrored(2), one_trace=2)


class AsksForItsNumber(keras.Sequential):
    """A step that is another on each replica, and the same in sum."""

    def train_step(self, data: Any) -> Any:
        CALLS.append(str(tf.distribute.get_replica_context().replica_id_in_sync_group))
        return super().train_step(data)


def test_a_step_that_asks_for_its_number_has_a_trace_for_each_replica() -> None:
    """XLA is off there."""

    def build() -> keras.Model:
        model = AsksForItsNumber([keras.Input((5,)), layers.Dense(1, "sigmoid")])
        return compiled(model, "adam", "binary_crossentropy", jit_compile=True)

    assert tfd.explain(tfd.distribute(build, mirrored(3))).steps == ()
    CALLS.clear()
    with pytest.warns(
        UserWarning, match="jit_compile=True is off: the step uses the ID of"
    ) as told:
        _, ours = assert_trains_as_keras(build, X, Y, strategy=mirrored(3), **FIT)
    assert len(told) == 1
    assert len(set(CALLS)) >= 3
    ours.evaluate(X, Y, verbose=0)
    why = "the step uses the ID of its replica"
    explained = tfd.explain(ours)
    assert explained.steps == (
        f"train: a trace for each of 3 replicas: {why}",
        "test: one trace for the 3 replicas of this task, compiled by XLA",
    )
    assert f"steps        train: a trace for each of 3 replicas: {why}" in str(explained)


# XLA compiles a step again for each number of rows: batches of 31 are parts of 10, 10 and 11 rows.
NUMBERS = np.random.default_rng(0).integers(0, 20, (62, 5))


def by_xla(*between: Callable[[], layers.Layer]) -> Callable[[], keras.Model]:
    def build() -> keras.Model:
        inputs = x = keras.Input((5,), dtype="int32")
        for layer in (layers.Embedding(20, 3), *(make() for make in between)):
            x = layer(x)
        model = keras.Model(inputs, layers.Dense(1, activation="sigmoid")(x))
        clipped = keras.optimizers.SGD(0.1, clipnorm=1.0)
        settings = {"metrics": ["accuracy"], "jit_compile": True}
        return compiled(model, clipped, "binary_crossentropy", **settings)

    return build


def lstm() -> layers.Layer:
    """A loop: its gradient must be traced for XLA."""
    return layers.LSTM(4)


def test_xla_compiles_what_replicas_do_between_sums() -> None:
    _, ours = assert_trains_as_keras(
        by_xla(lstm), NUMBERS, Y[:62], strategy=mirrored(3), eager=False, batch_size=31
    )
    assert ours.keras_model.jit_compile
    assert tfd.explain(ours).steps == (f"{ONE_TRACE}, compiled by XLA",)


@pytest.mark.parametrize(
    ("strategy", "between", "why"),
    [
        ("central_storage", [layers.Flatten], "replicas use a variable that is on another device"),
        ("mirrored", [lstm, statistics], "a sum over replicas is between a loop and its gradients"),
    ],
)
def test_xla_is_off_where_it_cannot_compile_the_step(strategy: str, between: Any, why: str) -> None:
    with pytest.warns(UserWarning, match=f"jit_compile=True is off: {why}"):
        ours, _ = distributed_fit(
            by_xla(*between), NUMBERS, Y[:62], strategy=strategy_of(strategy, 3), batch_size=31
        )
    assert tfd.explain(ours).steps == (ONE_TRACE,)


def test_an_operation_takes_variables_of_several_devices() -> None:
    rules = {".*/kernel": "owned", ".*/bias": "device CPU:1"}
    devices = [f"CPU:{number}" for number in range(3)]
    strategy = tfd.create_strategy("placed", devices=devices, placement=rules)
    build = of_layers(lambda: layers.Reshape((4, 1)), lambda: layers.LSTM(3), optimizer="sgd")
    _, ours = assert_trains_as_keras(build, X, Y, strategy=strategy, **FIT)
    (explained,) = tfd.explain(ours).steps
    assert "an operation in the step uses variables of several devices" in explained


class Checked(layers.Layer):
    """Refuses numbers, when it runs."""

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        with tf.control_dependencies([tf.debugging.assert_less(inputs, 9.0, "too large")]):
            return tf.identity(inputs)


def test_the_error_of_a_replica_is_raised() -> None:
    wrong = X.copy()
    wrong[11:] = 10.0  # the second replica's part of the first batch
    model = tfd.distribute(compiled(stack(Checked(), layers.Dense(1))), mirrored(3))
    for _ in range(10):  # each time, and not that other replicas were cancelled
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"(?s)node .*/checked.*too large"):
            model.fit(wrong, Y, batch_size=32, shuffle=False, verbose=0)
    model.fit(X, Y, batch_size=32, shuffle=False, verbose=0)  # the same trace
    assert tfd.explain(model).steps == (ONE_TRACE,)


def test_the_error_of_a_replica_in_a_step_with_a_loop_is_raised_or_is_in_the_log() -> None:
    wrong = X.copy()
    wrong[11:] = 10.0
    loop = stack(Checked(), layers.Reshape((X.shape[1], 1)), layers.LSTM(2), layers.Dense(1))
    model = tfd.distribute(compiled(loop), mirrored(3))
    said = "too large|A step failed on one replica.*Local rendezvous.*TF_CPP_MIN_LOG_LEVEL=1"
    with pytest.raises((tf.errors.InvalidArgumentError, tfd.TrainingError), match=said):
        model.fit(wrong, Y, batch_size=32, shuffle=False, verbose=0)
    # The step that failed counts on the replica that did not; no other step has run.
    assert int(model.optimizer.iterations) <= 1
    assert tfd.explain(model).steps == (ONE_TRACE,)
