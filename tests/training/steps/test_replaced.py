"""Keras and TensorFlow are as their authors made them, but in a step; a step goes our way.

What a new release might do is planted here: Keras's code, that takes another way past one of the
functions that are replaced while a step runs.
"""

from __future__ import annotations

import inspect
import itertools
import os
import subprocess
import sys
import threading
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from task_programs import LEFT_OUT
from training_cases import X, Y, classifier, compiled, mirrored, stack

import tfdist_ext as tfd
from tfdist_ext.training._keras_private import REPLACED, Replacement, Target
from tfdist_ext.training.steps import exact
from tfdist_ext.training.steps.context import ReplicaSums

FIT = {"batch_size": 16, "verbose": 0}


def in_place() -> dict[Target, Any]:
    """What is found under the name of each replaced function."""
    targets = [each.targets()[: len(each.paths)] for each in REPLACED]  # without overrides
    return {target: inspect.getattr_static(*target) for target in itertools.chain(*targets)}


AT_FIRST = in_place()


@pytest.fixture(autouse=True)
def as_before():
    """Each test of this file leaves everything as it was."""
    yield
    assert in_place() == AT_FIRST


WATCHED = """
import inspect, os, sys
import keras, numpy as np, tensorflow as tf

FUNCTIONS = (type(lambda: None), property, classmethod, staticmethod)

def functions():
    # Of modules, and of the classes in them.
    found = {}
    for name, module in list(sys.modules.items()):
        if name.startswith(("keras.", "tensorflow.")) and isinstance(vars(module), dict):
            owners = [module, *(v for v in list(vars(module).values()) if inspect.isclass(v))]
            for owner in owners:
                if getattr(owner, "__module__", name).startswith(("keras.", "tensorflow.")):
                    for key, value in list(vars(owner).items()):
                        if isinstance(value, FUNCTIONS):
                            found[getattr(owner, "__qualname__", name), name, key] = value
    return found

def build():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, kernel_regularizer="l2")])
    model.compile("adam", "mse", metrics=["mae"])
    return model

x = np.ones((8, 3), "float32")
cpus = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(cpus[0], [tf.config.LogicalDeviceConfiguration()] * 2)
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
with strategy.scope():
    build().fit(x, x[:, :1], verbose=0)  # loads what is loaded late
before = functions()
import tfdist_ext as tfd, tfdist_ext.testing, tfdist_ext.strategies, tfdist_ext.placement
model = tfd.distribute(build, tfd.create_strategy("mirrored", devices=["CPU:0", "CPU:1"]))
model.fit(x, x[:, :1], verbose=0)
model.predict(x, verbose=0)
after = functions()
print(len(before), [key for key in before if after.get(key) is not before[key]])
owners = {key[:2] for key in before}
print([key for key in after if key not in before and key[:2] in owners])
"""


def test_an_import_and_a_fit_leave_all_of_keras_and_tensorflow_as_they_were() -> None:
    """Every function and property of every module that is loaded, not those of the list alone."""
    env = {**os.environ, "PYTHONPATH": LEFT_OUT}
    command = [sys.executable, "-c", WATCHED]
    output = subprocess.check_output(command, text=True, timeout=120, env=env)
    counted, added = output.strip().splitlines()[-2:]
    number, changed = counted.split(" ", 1)
    assert int(number) > 20_000
    assert changed == added == "[]"


def test_fits_in_two_threads_do_not_see_each_other() -> None:
    """One trains while the other is in the middle of a step of its own, or of Keras's own fit."""
    inside, done = threading.Event(), threading.Event()
    met: list[bool] = []

    class Waits(keras.Sequential):
        def train_step(self, data: Any) -> Any:
            inside.set()
            met.append(done.wait(60))
            return super().train_step(data)

    def build(kind: type = keras.Sequential) -> keras.Model:
        keras.utils.set_random_seed(1)
        model = kind([keras.Input((5,)), keras.layers.Dense(1)])
        return compiled(model, keras.optimizers.Adam(0.1), run_eagerly=kind is Waits)

    expected = build()
    expected.fit(X, Y, shuffle=False, **FIT)
    waiting = tfd.distribute(lambda: build(Waits), mirrored(2))
    thread = threading.Thread(target=lambda: waiting.fit(X, Y, shuffle=False, **FIT))
    thread.start()
    assert inside.wait(60)
    assert in_place() != AT_FIRST
    plain, ours = build(), tfd.distribute(build, mirrored(3))
    plain.fit(X, Y, shuffle=False, **FIT)
    ours.fit(X, Y, shuffle=False, **FIT)
    assert mirrored(2).num_replicas_in_sync == 2
    done.set()
    thread.join(120)
    assert met
    for other in (plain, ours, waiting):
        for one, two in zip(expected.get_weights(), other.get_weights(), strict=True):
            np.testing.assert_allclose(two, one, rtol=0, atol=1e-6)


# What a new release of Keras might do; each is past one function, and else as Keras does it.

_apply = keras.optimizers.Optimizer.apply
_loss = keras.losses.Loss.__call__


def step_past_apply(self: keras.Model, data: Any) -> Any:
    x, y = data[:2]
    with tf.GradientTape() as tape:
        y_pred = self(x, training=True)
        loss = self.compute_loss(x, y, y_pred)
        self._loss_tracker.update_state(loss)
    weights = self.trainable_weights
    _apply(self.optimizer, tape.gradient(loss, weights), weights)
    return self.compute_metrics(x, y, y_pred)


def compute_loss_past_the_call(self: Any, x: Any, y: Any, y_pred: Any, *more: Any, **_: Any) -> Any:
    loss = _loss(keras.losses.BinaryCrossentropy(), y, y_pred)
    return loss / tf.distribute.get_strategy().num_replicas_in_sync


def normalized_by_the_part(self: Any, inputs: Any, training: bool = False, mask: Any = None) -> Any:
    mean, variance = keras.ops.moments(inputs, 0)
    self.moving_mean.assign(mean)
    return self.gamma * (inputs - mean) / keras.ops.sqrt(variance + 0.1) + self.beta


def noise_by_a_hash(layer: Any, inputs: Any, training: bool = False) -> Any:
    if not training:
        return inputs
    seed = tf.cast(layer.seed_generator.next(), tf.int32)
    places = tf.range(tf.size(inputs))
    order = tf.random.experimental.index_shuffle(places, seed, tf.size(inputs) - 1)
    return tf.where(tf.reshape(order % 2 == 0, tf.shape(inputs)), inputs, 0)


def losses_added_by_itself(self: Any, x: Any, y: Any, y_pred: Any, *more: Any, **_: Any) -> Any:
    return self._compile_loss(y, y_pred) + keras.ops.sum(keras.ops.stack(self.losses))


LOSSES = keras.src.losses.loss
PLANTED: dict[Replacement, list[tuple[Any, str, Any]]] = {
    exact.optimizer_apply: [(keras.Model, "train_step", step_past_apply)],
    exact.call_loss: [(keras.Model, "compute_loss", compute_loss_past_the_call)],
    exact.moments: [(keras.layers.BatchNormalization, "call", normalized_by_the_part)],
    exact.random_operation: [(keras.layers.GaussianNoise, "call", noise_by_a_hash)],
    exact.added_loss: [(keras.Model, "compute_loss", losses_added_by_itself)],
    exact.replicas_in_sync: [
        (LOSSES, f"{name}_loss_for_distribution", lambda value: value)
        for name in ("scale", "unscale")
    ],
}


class Penalty(keras.layers.Layer):
    def call(self, x: Any) -> Any:
        self.add_loss(keras.ops.mean(keras.ops.square(x)))
        return x


def with_all() -> keras.Model:
    """A model whose step must call each of the functions."""
    layers = keras.layers
    normal = layers.BatchNormalization(synchronized=True)
    model = stack(
        layers.Dense(4), Penalty(), normal, layers.GaussianNoise(0.5), layers.Dense(1, "sigmoid")
    )
    return compiled(model, "sgd", "binary_crossentropy")


def test_a_step_calls_the_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `check_called` expects, and what numbers alone show."""
    seen: set[Any] = set()

    def check(model: Any, kind: str, called: set[Any], written: Any, losses: Any) -> None:
        seen.update(called)

    monkeypatch.setattr("tfdist_ext.training.steps.exact.check_called", check)
    tfd.distribute(with_all, mirrored()).fit(X, Y, **FIT)
    expected = {
        *PLANTED,
        exact.clear_losses,
        exact.tape_gradient,
        exact.reduce_loss,
        exact.update_mean,
    }
    assert not expected - seen


@pytest.mark.filterwarnings("ignore:The step relates values")
@pytest.mark.parametrize("key", PLANTED, ids=lambda key: key.function.__name__)
def test_a_way_past_a_function_is_an_error(
    key: Replacement, monkeypatch: pytest.MonkeyPatch
) -> None:
    for planted in PLANTED[key]:
        monkeypatch.setattr(*planted)
    model = tfd.distribute(with_all, mirrored())
    before = model.get_weights()
    with pytest.raises(tfd.TfDistError) as caught:
        model.fit(X, Y, **FIT)
    for replaced in REPLACED:
        names = " or ".join(path.replace(":", ".") for path in replaced.paths)
        assert (f" {names}, which" in str(caught.value)) == (replaced is key)
    assert f"Keras {keras.__version__}" in str(caught.value)
    assert "docs/compatibility.md" in str(caught.value)
    for one, other in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    monkeypatch.undo()


@pytest.mark.filterwarnings("ignore:The step relates values")
def test_a_function_that_is_gone_is_missed_by_those_who_need_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A model without a synchronized BatchNormalization trains without what that needs."""
    monkeypatch.setitem(vars(exact.moments), "paths", ["keras:layers.BatchNormalization._moved"])
    tfd.distribute(classifier(), mirrored()).fit(X, Y, **FIT)
    with pytest.raises(tfd.TfDistError, match=r"did not call \S+tion._moved,"):
        tfd.distribute(with_all, mirrored()).fit(X, Y, **FIT)
    monkeypatch.undo()


def test_collectives_past_their_keys() -> None:
    sums = ReplicaSums(2, between_workers=True)
    said = pytest.raises(tfd.TfDistError, match=r"did not call \S+_next_instance_key")
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope(), said, sums.keys_of_size(tf.constant(4)):
        pass
