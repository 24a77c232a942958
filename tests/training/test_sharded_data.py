"""A ShardedDataset in fit: the same numbers for every number of replicas, as in plain Keras."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from training_cases import (
    KillAfter,
    KilledError,
    X,
    Y,
    assert_same_history,
    assert_same_weights,
    mirrored,
)
from training_cases import (
    small_model as build,
)

import tfdist_ext as tfd

ROWS, BATCH, EPOCHS = 50, 16, 3
DATA = (X[:ROWS], Y[:ROWS])


_MODELS: dict[tf.distribute.Strategy, tuple[Any, list[np.ndarray]]] = {}


def distributed(strategy: tf.distribute.Strategy) -> tfd.DistributedModel:
    """The model as it began. What was compiled for one test is there for the next."""
    if strategy not in _MODELS:
        model = tfd.distribute(build, strategy)
        _MODELS[strategy] = model, [v.numpy() for v in variables_of(model)]
    model, start = _MODELS[strategy]
    for variable, value in zip(variables_of(model), start, strict=True):
        variable.assign(value)
    model.keras_model.stop_training = False
    return model


def variables_of(model: tfd.DistributedModel) -> list[Any]:
    return [*model.keras_model.weights, *model.keras_model.optimizer.variables]


def sharded() -> Any:
    return tfd.data.from_arrays(DATA, global_batch_size=BATCH, seed=4)


@pytest.fixture(scope="module")
def expected() -> tuple[keras.Model, dict[str, list[float]]]:
    """Plain Keras on the same batches."""
    model, data = build(), sharded()
    model.run_eagerly = True  # few small steps take less time than making a graph of one
    batches = data.dataset(epoch=0)
    for epoch in range(1, EPOCHS):
        batches = batches.concatenate(data.dataset(epoch=epoch))
    history = model.fit(
        batches.repeat(), steps_per_epoch=4, epochs=EPOCHS, verbose=0, shuffle=False
    ).history
    return model, history


def test_the_numbers_of_one_device(expected: Any) -> None:
    data = sharded()
    ours = distributed(mirrored(3))
    history = ours.fit(data, epochs=EPOCHS, verbose=0).history
    assert_same_weights(expected[0], ours)
    assert_same_history(expected[1], history)
    assert data.position == (EPOCHS, 0)


def test_evaluate_and_predict_read_all_of_it_in_the_order_of_the_data() -> None:
    ordered = tfd.data.from_arrays(DATA, global_batch_size=BATCH)
    ours = distributed(mirrored(3))
    expected = build()
    ordered.advance(2)
    np.testing.assert_allclose(
        ours.evaluate(ordered, verbose=0), expected.evaluate(*DATA, verbose=0), rtol=1e-5
    )
    inputs = tfd.data.from_arrays(DATA[0], global_batch_size=BATCH, seed=4)
    inputs.advance(2)
    np.testing.assert_allclose(
        ours.predict(inputs, verbose=0), expected.predict(DATA[0], verbose=0), rtol=1e-5
    )
    assert inputs.position == (0, 2 * BATCH)
    ours.fit(ordered, epochs=1, validation_data=ordered, verbose=0)


def test_another_global_batch_in_the_middle_of_an_epoch_is_refused() -> None:
    data = sharded()
    data.advance(1)
    other = tfd.data.from_arrays(DATA, global_batch_size=10, seed=4)
    other.restore(data.state())
    with pytest.raises(tfd.TrainingError, match="inside a global batch of 10"):
        distributed(mirrored(2)).fit(other, verbose=0)


def test_killed_in_an_epoch_and_gone_on_with_other_replicas(expected: Any, tmp_path: Path) -> None:
    """A checkpoint every second batch: also those of an epoch that is not done are gone on from."""
    arguments: dict[str, Any] = {
        "epochs": EPOCHS,
        "checkpoint_dir": tmp_path,
        "checkpoint_every": 2,
        "verbose": 0,
    }
    first = distributed(mirrored(2))
    with pytest.raises(KilledError):
        first.fit(sharded(), callbacks=[KillAfter(7)], **arguments)
    data = sharded()
    second = distributed(mirrored(3))
    history = second.fit(data, **arguments).history
    assert_same_weights(expected[0], second)
    # The epoch that was broken off counts all of its examples.
    for name, values in history.items():
        np.testing.assert_allclose(values, expected[1][name][-len(values) :], rtol=1e-5)
    assert int(second.keras_model.optimizer.iterations.numpy()) == 4 * EPOCHS
    assert data.position == (EPOCHS, 0)
    assert second.fit(data, **arguments).history == history  # it is done


def test_checkpoints_in_an_epoch_need_a_position(tmp_path: Path) -> None:
    ours = distributed(mirrored(2))
    with pytest.raises(tfd.TrainingError, match="needs checkpoint_dir"):
        ours.fit(sharded(), verbose=0, checkpoint_every=2)
    options: dict[str, Any] = {"checkpoint_every": 2, "checkpoint_dir": tmp_path}
    batches = (batch for batch in [(X[:4], Y[:4])])
    with pytest.raises(tfd.TrainingError, match="data that can resume inside an epoch"):
        ours.fit(batches, verbose=0, steps_per_epoch=1, **options)


@pytest.fixture
def damaged(tmp_path: Path) -> str:
    """Records of 12 rows, of which those numbered 2 and 3 are damaged: the whole second step."""
    path = tmp_path / "rows.tfrecord"
    with tf.io.TFRecordWriter(str(path)) as writer:
        for row in range(12):
            writer.write(np.append(X[row], Y[row]).astype("float32").tobytes())
    content = bytearray(path.read_bytes())
    size = len(content) // 12
    for row in (2, 3):
        content[size * row + 20] ^= 1
    path.write_bytes(content)
    return str(path)


def of_record(record: tf.Tensor) -> Any:
    numbers = tf.ensure_shape(tf.io.decode_raw(record, tf.float32), [6])
    return numbers[:5], numbers[5:]


def test_damaged_records_end_a_training_by_name(damaged: str) -> None:
    data = tfd.data.from_tfrecords(damaged, of_record, global_batch_size=2)
    ours = distributed(mirrored(2))
    for call in (ours.fit, ours.evaluate, ours.predict):
        with pytest.raises(tfd.DataError, match=r"rows\.tfrecord: record [23] at byte \d+ is dam"):
            call(data, verbose=0)


def test_damaged_records_are_left_out(damaged: str) -> None:
    """As plain Keras does without them: a replica, and a whole step, that are left with none."""
    data = tfd.data.from_tfrecords(damaged, of_record, global_batch_size=4, on_error="skip")
    ours = distributed(mirrored(2))
    with pytest.warns(UserWarning, match="is damaged"):
        ours.fit(data, epochs=1, verbose=0, shuffle=False)
    rows = [0, 1, *range(4, 12)]
    plain = build()
    for batch in (rows[:2], rows[2:6], rows[6:]):
        plain.train_on_batch(X[batch], Y[batch])
    assert_same_weights(plain, ours)


def test_other_kinds_of_data_after_a_checkpoint(tmp_path: Path) -> None:
    """At the end of an epoch, other data may come: its epochs are counted on."""
    arguments: dict[str, Any] = {"checkpoint_dir": tmp_path, "verbose": 0}
    distributed(mirrored(2)).fit(*DATA, epochs=2, **arguments)
    data = sharded()
    distributed(mirrored(2)).fit(data, epochs=3, **arguments)
    assert data.position == (3, 0)
