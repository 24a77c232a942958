"""Whatever Keras takes as data; the same steps as Keras, and no step more."""

from __future__ import annotations

import random
import re
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from training_cases import (
    CLASSIFIER,
    Reshuffled,
    X,
    Y,
    assert_same_history,
    assert_same_weights,
    assert_trains_as_keras,
    batches,
    classifier,
    compiled,
    distributed_fit,
    mirrored,
    of_unknown_length,
    plain_fit,
    steps_taken,
)

import tfdist_ext as tfd
from tfdist_ext.data.batches import Readers
from tfdist_ext.data.pipelines import parts_of_dataset
from tfdist_ext.data.reading import batches_of

# Keras's own fit says this where ours says what is below; both are expected.
KERAS_RAN_OUT = pytest.mark.filterwarnings("ignore:Your input ran out of data")
OURS_RAN_OUT = "the data ended after"


def two_inputs() -> keras.Model:
    inputs = {name: keras.Input((5,), name=name) for name in ("a", "b")}
    joined = keras.layers.Concatenate()([inputs["a"], inputs["b"]])
    outputs = {
        "p": keras.layers.Dense(1, name="p")(joined),
        "q": keras.layers.Dense(1, activation="sigmoid", name="q")(joined),
    }
    model = keras.Model(inputs, outputs)
    model.compile(
        keras.optimizers.Adam(0.01),
        {"p": "mse", "q": "binary_crossentropy"},
        loss_weights={"p": 0.3, "q": 2.0},
        metrics={"p": ["mae"], "q": ["accuracy"]},
    )
    return model


def test_dicts_of_inputs_and_outputs() -> None:
    x, y = {"a": X, "b": X[::-1].copy()}, {"p": X[:, :1], "q": Y}
    plain, ours = assert_trains_as_keras(two_inputs, x, y, batch_size=16, validation_data=(x, y))
    expected, predicted = plain.predict(x, verbose=0), ours.predict(x, verbose=0)
    assert list(predicted) == list(expected)
    for name in expected:
        np.testing.assert_allclose(predicted[name], expected[name], atol=1e-6)


def test_strings() -> None:
    def build() -> keras.Model:
        words = keras.Input((1,), dtype="string")
        numbers = keras.layers.StringLookup(vocabulary=["a", "b", "c"])(words)
        flat = keras.layers.Flatten()(keras.layers.Embedding(5, 3)(numbers))
        model = keras.Model(words, keras.layers.Dense(1)(flat))
        model.compile("adam", "mse")
        return model

    words = tf.constant(list("abcd") * 16)[:, None]
    plain, _ = assert_trains_as_keras(build, words, tf.constant(Y), batch_size=16)
    copy = tfd.distribute(plain, mirrored())  # with its vocabulary
    expected = plain.predict(words, verbose=0)
    np.testing.assert_allclose(copy.predict(words, verbose=0), expected, atol=1e-6)


def test_ragged_batches() -> None:
    """Sparse ones: steps/test_sparse_gradients.py."""

    class SumOfWeights(keras.Model):
        def __init__(self):
            super().__init__()
            self.table = self.add_weight(shape=(9, 1), initializer="ones")

        def call(self, numbers):
            table = tf.convert_to_tensor(self.table)
            if isinstance(numbers, tf.RaggedTensor):
                numbers = numbers.to_tensor()
            return tf.reduce_sum(tf.gather(table, numbers), axis=1)

    def of_ragged() -> keras.Model:
        model = SumOfWeights()
        model.compile(keras.optimizers.SGD(0.001), "mse")
        return model

    ragged = tf.ragged.constant([[1 + i % 8] * (i % 4 + 1) for i in range(64)])
    assert_trains_as_keras(of_ragged, tf.data.Dataset.from_tensor_slices((ragged, Y)).batch(16))


@KERAS_RAN_OUT
@pytest.mark.filterwarnings(f"ignore:{OURS_RAN_OUT}")
@pytest.mark.parametrize(
    ("data", "steps"),
    [
        pytest.param(lambda: (of_unknown_length(batches()),), None, id="unknown length"),
        pytest.param(lambda: (X, Y, 16), 3, id="arrays, steps that do not divide the pass"),
    ],
)
def test_epochs_have_the_steps_of_keras(data, steps) -> None:
    arguments = {"epochs": 3, "steps_per_epoch": steps}
    plain, expected = plain_fit(CLASSIFIER, *data(), **arguments)
    ours, history = distributed_fit(CLASSIFIER, *data(), **arguments)
    assert_same_weights(plain, ours)
    assert_same_history(expected, history)


def test_steps_are_counted_exactly() -> None:
    """Keras counts the steps for which there was no data, too: 15 and 24."""
    ours, _ = distributed_fit(CLASSIFIER, of_unknown_length(batches()), epochs=3)
    assert steps_taken(ours) == 12
    every_four = classifier(steps_per_execution=4)
    ours, _ = distributed_fit(every_four, X[:60], Y[:60], batch_size=6, epochs=2)
    assert steps_taken(ours) == 20
    with pytest.warns(UserWarning, match="ended after 4 of the 7 steps"):
        ours, _ = distributed_fit(CLASSIFIER, batches(), steps_per_epoch=7)
    assert steps_taken(ours) == 4


def test_steps_do_not_get_the_memory_of_the_users_arrays() -> None:
    """A step may write into the memory of its inputs."""
    memory = np.zeros(96, "float32")
    start = -memory.ctypes.data % 64 // 4  # TensorFlow copies what is not aligned
    labels = memory[start : start + 64]

    def shares(tensor: tf.Tensor) -> bool:
        return np.shares_memory(np.frombuffer(memoryview(tensor), "float32"), labels)

    spec = tf.TensorSpec([64], tf.float32)
    dataset = tf.data.Dataset.from_generator(lambda: iter([labels]), output_signature=spec)
    assert shares(next(iter(dataset)))
    for readers in (1, 2):
        ((_, _, part),) = next(iter(parts_of_dataset(dataset)(0, 1, readers)))
        assert not shares(part)

    class Labels:
        element_spec = tf.TensorSpec([None], tf.float32)

        def __len__(self) -> int:
            return 64

        def take(self, rows: tf.Tensor) -> tf.Tensor:
            part = tf.numpy_function(lambda rows: labels[: len(rows)], [rows], tf.float32)
            return tf.ensure_shape(part, [None])

        def fingerprint(self) -> dict[str, int]:
            return {}

    for data in (
        tfd.data.from_source(Labels(), global_batch_size=64),
        tfd.data.from_arrays(labels, global_batch_size=64),
    ):
        assert not shares(next(iter(data.dataset(epoch=0))))


def test_a_generator_that_has_ended() -> None:
    with pytest.warns(UserWarning, match=r"this epoch had \d steps, an earlier one 4"):
        distributed_fit(CLASSIFIER, (batch for batch in list(batches())), epochs=2)


@pytest.mark.long("two")
@pytest.mark.parametrize(
    "workers", [{"workers": 0}, {"workers": 2, "use_multiprocessing": True}], ids=["none", "two"]
)
def test_py_dataset(workers: dict[str, Any]) -> None:
    data = [Reshuffled(**workers) for _ in range(4)]
    plain, expected = plain_fit(CLASSIFIER, data[0], epochs=3, validation_data=data[1])
    ours, history = distributed_fit(CLASSIFIER, data[2], epochs=3, validation_data=data[3])
    assert_same_weights(plain, ours)
    assert_same_history(expected, history)
    wanted = [plain.evaluate(data[0], verbose=0), plain.predict(data[1], verbose=0)]
    found = [ours.evaluate(data[2], verbose=0), ours.predict(data[3], verbose=0)]
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-5)
    np.testing.assert_allclose(found[1], wanted[1], atol=1e-6)
    if workers["workers"]:  # the threads' own calls come at any time
        for each in data:
            each.calls = [call for call in each.calls if not call.isdigit()]
    assert data[2].calls == data[0].calls
    assert data[3].calls == data[1].calls


def test_generator() -> None:
    def endless():
        while True:
            yield from ((X[i : i + 16], Y[i : i + 16]) for i in range(0, 64, 16))

    arguments = {"epochs": 3, "steps_per_epoch": 3}
    plain, _ = plain_fit(CLASSIFIER, endless(), **arguments)
    ours, _ = distributed_fit(CLASSIFIER, endless(), **arguments)
    assert_same_weights(plain, ours)
    some = {"steps": 2, "verbose": 0}
    expected = plain.evaluate(endless(), **some)
    np.testing.assert_allclose(ours.evaluate(endless(), **some), expected, rtol=1e-5)
    predicted = ours.predict(((x,) for x, _ in endless()), **some)
    np.testing.assert_allclose(predicted, plain.predict(X[:32], verbose=0), atol=1e-6)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        pytest.param(
            lambda: tf.data.Dataset.from_tensor_slices((X, Y[:, 0])), "Call .batch", id="no batches"
        ),
        pytest.param(lambda: batches().repeat(), "steps_per_epoch", id="infinite, no steps"),
        pytest.param(
            lambda: batches().filter(lambda *_: False),
            "produced no batch",
            id="empty in the end",
        ),
        pytest.param(
            lambda: mirrored().experimental_distribute_dataset(batches()),
            "The data is distributed already",
            id="distributed already",
        ),
    ],
)
def test_data_that_cannot_be_used_is_refused(data, message: str) -> None:
    with pytest.raises(tfd.TrainingError, match=message):
        tfd.distribute(classifier(), mirrored()).fit(data(), verbose=0)


def test_the_distributed_iterator_feeds_the_same_parts() -> None:
    plain, _ = plain_fit(classifier("adam"), X, Y, batch_size=16, epochs=2)
    keras.utils.set_random_seed(1)
    model = tfd.distribute(classifier("adam"), mirrored())
    assert model._tfdist_ext.reduction.feeds_on_host
    model._tfdist_ext.reduction.feeds_on_host = False
    model.fit(X, Y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    assert_same_weights(plain, model)
    uneven = of_unknown_length(batches(rows=41))
    expected = plain.evaluate(X[:41], Y[:41], verbose=0)
    np.testing.assert_allclose(model.evaluate(uneven, verbose=0)[1], expected[1], atol=1e-6)
    np.testing.assert_allclose(
        model.predict(uneven, verbose=0), plain.predict(X[:41], verbose=0), atol=1e-6
    )


BATCHES = 12


class Numbered(keras.utils.PyDataset):
    """Batch i holds two rows with the number i."""

    num_batches = BATCHES

    def __getitem__(self, index: int) -> Any:
        return np.full((2, 1), index, "float32"), np.array([index % 2, 1], "float32")


def numbers_of(batch: Any) -> int:
    return int(batch[0][2][0][0, 0])


def passes_over(source: Numbered, random_seed: int, passes: int = 3, **options: Any) -> Any:
    random.seed(random_seed)  # as on tasks that have drawn other numbers before
    arguments = {"shuffle": True, "seed": lambda: 7, "readers": Readers(), **options}
    batches: Any = batches_of(source, **arguments)
    data = parts_of_dataset(batches.dataset)(0, 1, 1)
    return [[numbers_of(batch) for batch in data] for _ in range(passes)]


@pytest.mark.parametrize(
    "options", [{}, {"workers": 2, "max_queue_size": 3}], ids=["here", "short queue"]
)
def test_every_task_has_the_same_new_order_in_each_pass(options: dict[str, Any]) -> None:
    one, other = (passes_over(Numbered(**options), seed) for seed in (1, 2))
    assert one == other
    assert all(sorted(order) == list(range(BATCHES)) for order in one)
    assert one[0] != one[1] != one[2]
    assert one != passes_over(Numbered(**options), 1, seed=lambda: 8)


def test_a_tensor_without_a_row_for_each_example_is_named() -> None:
    data = batches().map(lambda x, y: (x, y, tf.ones([3])))
    model = tfd.distribute(compiled(keras.Sequential([keras.layers.Dense(1)])), mirrored())
    found = re.escape("sample_weight has shape [3] in a batch of 16")
    with pytest.raises(tfd.DataError, match=found) as caught:
        model.fit(data, verbose=0)
    assert "over 2 replicas" in str(caught.value)
    assert "non-trainable weight" in str(caught.value)
    assert caught.value.__cause__ is None
