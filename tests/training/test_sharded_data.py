"""Data of `tfd.data` in fit: the same numbers for every number of replicas, as in plain Keras.

In one order of examples, and from a function of the shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
from tfdist_ext.data import Shard

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


def plain_training(of_epoch: Callable[[int], tf.data.Dataset]) -> Any:
    """The model and the history of plain Keras on the same batches."""
    model, batches = build(), of_epoch(0)
    model.run_eagerly = True  # few small steps take less time than making a graph of one
    for epoch in range(1, EPOCHS):
        batches = batches.concatenate(of_epoch(epoch))
    arguments = {"steps_per_epoch": 4, "epochs": EPOCHS, "verbose": 0, "shuffle": False}
    return model, model.fit(batches.repeat(), **arguments).history


@pytest.fixture(scope="module")
def expected() -> tuple[keras.Model, dict[str, list[float]]]:
    data = sharded()
    return plain_training(lambda epoch: data.dataset(epoch=epoch))


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


def rows_of_epoch(shard: Shard, epoch: int) -> tf.data.Dataset:
    """No random access, and no length: a generator of another order in each epoch."""
    order = np.random.default_rng(epoch).permutation(ROWS)[shard.index :: shard.count]

    def rows() -> Iterator[Any]:
        for row in order:
            yield X[row], Y[row]

    spec = (tf.TensorSpec([5], tf.float32), tf.TensorSpec(Y.shape[1:], Y.dtype))
    return tf.data.Dataset.from_generator(rows, output_signature=spec)


def by_function() -> Any:
    return tfd.data.from_dataset_fn(rows_of_epoch, global_batch_size=BATCH)


def of_one_shard(epoch: int) -> tf.data.Dataset:
    """What Keras gets of an epoch; it warns of batches that it cannot count."""
    batches = rows_of_epoch(Shard(0, 1), epoch).batch(BATCH)
    return batches.apply(tf.data.experimental.assert_cardinality(4))


@pytest.fixture(scope="module")
def one_device() -> tuple[keras.Model, dict[str, list[float]]]:
    return plain_training(of_one_shard)


def test_told_to_stop_it_goes_on_in_the_same_epoch(one_device: Any) -> None:
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.model.stop_training = self.model.optimizer.iterations == 6

    data = by_function()
    ours = distributed(mirrored(2))
    ours.fit(data, epochs=EPOCHS, verbose=0, callbacks=[Stop()])
    assert data.position == (1, 2)
    ours.fit(data, epochs=2, verbose=0)
    assert data.position == (EPOCHS, 0)
    assert_same_weights(one_device[0], ours)


def test_an_epoch_at_the_end_of_a_pass_begins_the_next(one_device: Any, tmp_path: Path) -> None:
    """Only reading tells that the pass of the data has ended."""
    options: dict[str, Any] = {"steps_per_epoch": 4, "checkpoint_dir": tmp_path, "verbose": 0}
    distributed(mirrored(2)).fit(by_function(), epochs=1, **options)
    data = by_function()
    ours = distributed(mirrored(2))
    ours.fit(data, epochs=2, **options)
    assert data.position == (1, 4)
    history = ours.fit(data, epochs=1, verbose=0).history
    np.testing.assert_allclose(history["loss"], one_device[1]["loss"][2:], rtol=1e-5)
    assert_same_weights(one_device[0], ours)


@pytest.mark.filterwarnings("ignore:the data ended after")
@pytest.mark.parametrize(("length", "steps"), [("known", 3), ("unknown", None)])
def test_without_an_epoch_a_job_resumes_in_the_passes_that_it_reads_again(
    length: str, steps: int | None, tmp_path: Path
) -> None:
    def shuffled(shard: Shard) -> tf.data.Dataset:
        rows = tf.data.Dataset.from_tensor_slices((X[:ROWS], Y[:ROWS])).shuffle(ROWS, seed=8)
        rows = rows.shard(shard.count, shard.index).batch(BATCH)
        return rows if length == "known" else rows.filter(lambda *_: True)

    def fit(folder: str, epochs: int) -> Any:
        keras.utils.set_random_seed(3)  # TensorFlow's own shuffle goes by it
        data = tfd.data.from_dataset_fn(shuffled)
        ours = tfd.distribute(build, mirrored(2))
        options = {"checkpoint_dir": tmp_path / folder, "steps_per_epoch": steps, "verbose": 0}
        history = ours.fit(data, epochs=epochs, **options).history
        return ours, history, data.position

    whole, history, position = fit("whole", 3)
    fit("parts", 2)
    resumed, *of_resumed = fit("parts", 3)
    assert of_resumed == [history, position]
    assert_same_weights(whole, resumed)


def test_evaluate_and_predict_read_one_epoch() -> None:
    data = tfd.data.from_dataset_fn(lambda shard: rows_of_epoch(shard, 0).batch(BATCH))
    ours, alone, rows = distributed(mirrored(3)), build(), of_one_shard(0)
    found, wanted = ours.evaluate(data, verbose=0), alone.evaluate(rows, verbose=0)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    found, wanted = ours.predict(data, verbose=0), alone.predict(rows, verbose=0)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
    assert data.position == (0, 0)
    with pytest.raises(tfd.TrainingError, match="Remove batch_size"):
        ours.fit(data, batch_size=8)


def test_epochs_of_other_lengths() -> None:
    lengths = (4, 2, 3)

    def of_epoch(shard: Shard, epoch: int) -> tf.data.Dataset:
        rows = lengths[epoch] * 5
        return tf.data.Dataset.from_tensor_slices((X[:rows], Y[:rows])).batch(5)

    ours, plain = distributed(mirrored(2)), build()
    ours.fit(tfd.data.from_dataset_fn(of_epoch), epochs=3, verbose=0)
    for length in lengths:
        plain.fit(X[: length * 5], Y[: length * 5], batch_size=5, shuffle=False, verbose=0)
    assert_same_weights(plain, ours)
