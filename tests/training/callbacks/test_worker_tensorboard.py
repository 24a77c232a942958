"""WorkerTensorBoard: what it writes, and that own time leaves out what a worker waits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from event_files import scalars
from training_cases import mirrored, strategy_of

import tfdist_ext as tfd
from tfdist_ext.training.callbacks.worker_tensorboard import slow_workers

ROWS, BATCH = 58, 12  # the last batch has 10


def data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    return rng.normal(size=(ROWS, 4)).astype("float32"), rng.normal(size=(ROWS, 1))


def build(**settings: Any) -> keras.Model:
    dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = keras.Sequential([keras.Input((4,)), dense])
    model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"], **settings)
    return model


def fit(strategy: tf.distribute.Strategy, **options: Any) -> tfd.DistributedModel:
    model = tfd.distribute(build, strategy)
    model.fit(*data(), batch_size=BATCH, shuffle=False, verbose=0, epochs=2, **options)
    return model


def test_one_process_writes_its_own_time_of_each_step(tmp_path: Path) -> None:
    strategy = tfd.create_strategy("mirrored", devices=2)
    board = tfd.WorkerTensorBoard(tmp_path)
    model = fit(strategy, callbacks=[board])
    written = scalars(tmp_path / "worker-0")
    assert list(written["own_ms"]) == list(range(1, 11))  # two epochs of five steps
    own, whole = (np.array(list(written[tag].values())) for tag in ("own_ms", "step_ms"))
    assert ((own > 0) & (own < whole)).all()
    np.testing.assert_allclose(board.own_ms, [own[5:].mean()], rtol=1e-5)

    # The same weights as without, to the bit; and a program without it has no notes.
    plain = fit(strategy)
    for one, other in zip(model.keras_model.weights, plain.keras_model.weights, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
    assert plain._tfdist_ext.loop("train").program.timer is None
    assert ("train", True) not in plain._tfdist_ext._loops


def test_update_freq_writes_means_and_a_second_fit_goes_on(tmp_path: Path) -> None:
    model = tfd.distribute(build, mirrored(2))
    board = tfd.WorkerTensorBoard(tmp_path, update_freq=3)
    for _ in range(2):
        model.fit(*data(), batch_size=BATCH, shuffle=False, verbose=0, callbacks=[board])
    assert list(scalars(tmp_path / "worker-0")["step_ms"]) == [3, 5, 8, 10]


def test_xla_is_off_with_one_warning(tmp_path: Path) -> None:
    model = tfd.distribute(lambda: build(jit_compile=True), strategy_of("one_device"))
    x, y = (value[:24] for value in data())
    options = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
    board = tfd.WorkerTensorBoard(tmp_path)
    with pytest.warns(UserWarning, match="jit_compile=True is off: XLA cannot record") as told:
        model.fit(x, y, callbacks=[board], **options)
    assert len(told) == 1
    assert told[0].filename == __file__
    model.fit(x, y, **options)
    model.fit(x, y, callbacks=[board], **options)
    assert model.keras_model.jit_compile
    assert list(scalars(tmp_path / "worker-0")["own_ms"]) == [1, 2, 5, 6]


def test_the_slow_worker_is_named() -> None:
    names = ["chief:0", "worker:0", "worker:1"]
    assert slow_workers(names, np.array([12.0, 41.0, 12.5]), 5.0) == [
        "worker:0 is slow: 41 ms of work per step; other workers need 12.2 ms"
    ]
    assert slow_workers(names, np.array([12.0, 14.0, 12.5]), 5.0) == []
    assert slow_workers(["worker:0"], np.array([12.0]), 0.1) == []


def test_plain_keras_and_a_wrong_update_freq_are_refused(tmp_path: Path) -> None:
    with pytest.raises(tfd.TrainingError, match=r"Use the fit\(\) of tfdist_ext"):
        build().fit(*data(), verbose=0, callbacks=[tfd.WorkerTensorBoard(tmp_path)])
    with pytest.raises(tfd.TrainingError, match="update_freq must be 1 step or more, got 0"):
        tfd.WorkerTensorBoard(tmp_path, update_freq=0)
