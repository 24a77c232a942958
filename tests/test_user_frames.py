"""Errors and warnings of a user's mistake end at the user's line."""

from __future__ import annotations

import importlib
import inspect
import linecache
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist_ext as tfd
from tfdist_ext.cluster import ClusterConfig
from tfdist_ext.placement import Rule

X = np.arange(64, dtype=np.float32).reshape(16, 4)
Y = X.sum(axis=1, keepdims=True)
pytestmark = pytest.mark.usefixtures("four_cpus")
LIBRARIES = ("tfdist_ext.", "keras.", "tensorflow.")


class FailingModel(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return self.dense(x)

    def train_step(self, data: Any) -> dict[str, tf.Tensor]:
        return {"loss": tf.zeros([2]) + tf.zeros([3])}


class EvaluatingCallback(keras.callbacks.Callback):
    def __init__(self, evaluate: Callable[[], None]) -> None:
        super().__init__()
        self.evaluate = evaluate

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.evaluate()


def failing_generator() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    yield X, Y
    raise KeyError("mine")


def failing_builder() -> keras.Model:
    return keras.Sequential([keras.layers.Dense(-1)])


def build(model: keras.Model | None = None, **compiled: Any) -> keras.Model:
    model = model or keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.001), "mse", **compiled)
    return model


def mirrored() -> tf.distribute.Strategy:
    return tfd.create_strategy("mirrored", devices=["CPU:0", "CPU:1"])


def distributed() -> tfd.DistributedModel:
    return tfd.distribute(build, mirrored())


def frames_of(call: Callable[[], Any]) -> list[tuple[str, str]]:
    """The module and the source line of each frame of what the call raises, from the call on."""
    with pytest.raises(Exception) as caught:  # noqa: PT011
        call()
    frames = []
    for frame, line in traceback.walk_tb(caught.value.__traceback__):
        source = inspect.getsourcelines(inspect.getmodule(frame))[0][line - 1].strip()
        frames.append((frame.f_globals["__name__"], source))
    return frames[1:]


def warned_line(warning: warnings.WarningMessage) -> str:
    return linecache.getline(warning.filename, warning.lineno).strip()


MISTAKES = {
    "fit": lambda: distributed().fit(X, Y, batch_size=-1),
    "fit, an unknown argument": lambda: distributed().fit(X, Y, batches=1),
    "evaluate": lambda: distributed().evaluate(np.array(["a"]), Y),
    "train_on_batch": lambda: distributed().train_on_batch(X[:, :3], Y),
    "an unknown attribute": lambda: distributed().nonsense,
    "compile": lambda: distributed().compile(optimizer="nonsense"),
    "restore_checkpoint": lambda: distributed().restore_checkpoint("nonsense"),
    "create_strategy": lambda: tfd.create_strategy("mirored"),
    "Shard": lambda: tfd.data.Shard(2, 2),
    "Rule": lambda: Rule("kernel", "nonsense"),
    "ClusterConfig.from_tf_config": lambda: ClusterConfig.from_tf_config("{"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_traceback_of_a_wrong_call_ends_at_the_call(name: str) -> None:
    assert [module for module, _ in frames_of(MISTAKES[name])] == [__name__]


@pytest.mark.parametrize("eagerly", [False, True])
def test_traceback_of_an_error_in_a_step_ends_in_the_step(eagerly: bool) -> None:
    model = tfd.distribute(lambda: build(FailingModel(), run_eagerly=eagerly), mirrored())
    call, step = frames_of(lambda: model.fit(X, Y))
    assert call == (__name__, "call, step = frames_of(lambda: model.fit(X, Y))")
    assert step == (__name__, 'return {"loss": tf.zeros([2]) + tf.zeros([3])}')


def test_traceback_of_an_error_in_a_user_function_ends_there() -> None:
    model = distributed()
    last = frames_of(lambda: model.fit(failing_generator(), steps_per_epoch=3, verbose=0))[-1]
    assert last == (__name__, 'raise KeyError("mine")')
    last = frames_of(lambda: tfd.distribute(failing_builder))[-1]
    assert last == (__name__, "return keras.Sequential([keras.layers.Dense(-1)])")


def test_tracebacks_of_causes_are_filtered() -> None:
    with pytest.raises(tfd.ClusterConfigError) as caught:
        ClusterConfig.from_tf_config("{")
    each: BaseException | None = caught.value
    while each is not None:
        for frame, _ in traceback.walk_tb(each.__traceback__):
            assert not frame.f_globals["__name__"].startswith(LIBRARIES)
        each = each.__cause__ or each.__context__


def test_keras_shows_all_frames_when_asked() -> None:
    keras.config.disable_traceback_filtering()
    try:
        modules = [module for module, _ in frames_of(MISTAKES["fit"])]
    finally:
        keras.config.enable_traceback_filtering()
    assert modules[-1] == "tfdist_ext.training.distribution"


def test_a_warning_points_at_the_users_call() -> None:
    model = distributed()
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)

    def evaluate() -> None:
        model.evaluate(data, steps=3, verbose=0)

    with pytest.warns(UserWarning, match="the data ended after 2 of the 3 steps") as caught:
        model.fit(data, steps_per_epoch=3, verbose=0, callbacks=[EvaluatingCallback(evaluate)])
    assert [warned_line(each) for each in caught] == [
        "model.fit(data, steps_per_epoch=3, verbose=0, callbacks=[EvaluatingCallback(evaluate)])",
        "model.evaluate(data, steps=3, verbose=0)",
    ]


@pytest.mark.parametrize("room", ["", ".data", ".placement", ".strategies", ".testing"])
def test_every_public_function_filters_its_traceback(room: str) -> None:
    module = importlib.import_module(f"tfdist_ext{room}")
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.isfunction(value):
            assert inspect.unwrap(value) is not value, name
