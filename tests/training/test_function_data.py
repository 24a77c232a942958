"""Data from a function of the shard in fit: what one process makes of it, on every strategy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from training_cases import (
    X,
    Y,
    assert_same_weights,
    mirrored,
)
from training_cases import (
    small_model as build,
)

import tfdist_ext as tfd
from tfdist_ext.data import Shard

ROWS, BATCH, EPOCHS = 50, 16, 3


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


def plain(epoch: int) -> tf.data.Dataset:
    """What Keras gets; it warns of batches that it cannot count."""
    batches = rows_of_epoch(Shard(0, 1), epoch).batch(BATCH)
    return batches.apply(tf.data.experimental.assert_cardinality(4))


@pytest.fixture(scope="module")
def expected() -> tuple[keras.Model, dict[str, list[float]]]:
    """Plain Keras on the same batches."""
    model = build()
    batches = plain(0)
    for epoch in range(1, EPOCHS):
        batches = batches.concatenate(plain(epoch))
    arguments = {"steps_per_epoch": 4, "epochs": EPOCHS, "shuffle": False, "verbose": 0}
    history = model.fit(batches.repeat(), **arguments).history
    return model, history


def test_told_to_stop_it_goes_on_in_the_same_epoch(expected: Any) -> None:
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.model.stop_training = self.model.optimizer.iterations == 6

    data = by_function()
    ours = tfd.distribute(build, mirrored(2))
    ours.fit(data, epochs=EPOCHS, verbose=0, callbacks=[Stop()])
    assert data.position == (1, 2)
    ours.fit(data, epochs=2, verbose=0)
    assert data.position == (EPOCHS, 0)
    assert_same_weights(expected[0], ours)


def test_an_epoch_at_the_end_of_a_pass_begins_the_next(expected: Any, tmp_path: Path) -> None:
    """Only reading tells that the pass of the data has ended."""
    options: dict[str, Any] = {"steps_per_epoch": 4, "checkpoint_dir": tmp_path, "verbose": 0}
    tfd.distribute(build, mirrored(2)).fit(by_function(), epochs=1, **options)
    data = by_function()
    ours = tfd.distribute(build, mirrored(2))
    ours.fit(data, epochs=2, **options)
    assert data.position == (1, 4)
    history = ours.fit(data, epochs=1, verbose=0).history
    np.testing.assert_allclose(history["loss"], expected[1]["loss"][2:], rtol=1e-5)
    assert_same_weights(expected[0], ours)


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
    ours, alone = tfd.distribute(build, mirrored(3)), build()
    found = ours.evaluate(data, verbose=0)
    np.testing.assert_allclose(found, alone.evaluate(plain(0), verbose=0), rtol=1e-5)
    np.testing.assert_allclose(
        ours.predict(data, verbose=0), alone.predict(plain(0), verbose=0), rtol=1e-5, atol=1e-6
    )
    assert data.position == (0, 0)
    with pytest.raises(tfd.TrainingError, match="Remove batch_size"):
        ours.fit(data, batch_size=8)


def test_epochs_of_other_lengths() -> None:
    lengths = (4, 2, 3)

    def of_epoch(shard: Shard, epoch: int) -> tf.data.Dataset:
        rows = lengths[epoch] * 5
        return tf.data.Dataset.from_tensor_slices((X[:rows], Y[:rows])).batch(5)

    ours, plain = tfd.distribute(build, mirrored(2)), build()
    ours.fit(tfd.data.from_dataset_fn(of_epoch), epochs=3, verbose=0)
    for length in lengths:
        plain.fit(X[: length * 5], Y[: length * 5], batch_size=5, shuffle=False, verbose=0)
    assert_same_weights(plain, ours)
