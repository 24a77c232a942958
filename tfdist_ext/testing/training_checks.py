"""Keras on a strategy, through `tfd.distribute`: the numbers of one device, saved and gone on."""

from __future__ import annotations

import tempfile

import keras
import numpy as np
import tensorflow as tf

from tfdist_ext.testing.asking import expect, expect_close, quiet
from tfdist_ext.testing.subject import Subject
from tfdist_ext.testing.trainings import SIZES, TESTED, Training, on_one_device
from tfdist_ext.training import distribute

__all__ = ["TrainingChecks"]


class TrainingChecks(Subject):
    """Weights, optimizer, losses, metrics and predictions against Keras on one device.

    Each of its models is trained on batches that the replicas share evenly, and on others.
    """

    def test_trains_dense_with_sgd(self) -> None:
        """With weights of rows and of regularization, and momentum."""
        self._expect_as_on_one_device("dense", "sgd")

    def test_trains_dense_with_adamw(self) -> None:
        """Clipped by the global norm, with averages of the weights."""
        self._expect_as_on_one_device("dense", "adamw")

    def test_trains_table_with_sgd(self) -> None:
        """With slices as gradients, and BatchNormalization over all replicas."""
        self._expect_as_on_one_device("table", "sgd")

    def test_trains_table_with_adamw(self) -> None:
        """The same, clipped, with slots for the table."""
        self._expect_as_on_one_device("table", "adamw")

    def test_training_saved_and_gone_on_with(self) -> None:
        """A checkpoint brings back weights and optimizer; the .keras file is plain Keras's."""
        training = self._training(*TESTED)
        rows = SIZES["uneven batches"]
        training.anew(rows)
        predictions = training.predictions(rows)
        saved = training.values()
        with tempfile.TemporaryDirectory() as folder, quiet():
            training.model.save_checkpoint(f"{folder}/checkpoint")
            training.model.save(f"{folder}/model.keras")
            further = training.go_on(rows)
            training.assign([np.zeros_like(value) for value in saved])
            training.model.restore_checkpoint(f"{folder}/checkpoint")
            loaded = keras.models.load_model(f"{folder}/model.keras")
        for variable, value, right in zip(
            training.variables, training.values(), saved, strict=True
        ):
            expect_close(f"{variable.path}, restored", value, right, 0)
        again = training.go_on(rows)
        for name, right in further.items():
            expect_close(f"{name}, gone on from the checkpoint", again[name], right, self.tolerance)
        found = training.predictions(rows, loaded)
        expect_close("predictions of the saved model", found, predictions, self.tolerance)

    def test_keras_metrics(self) -> None:
        """In a loop of one's own: what all replicas have seen, and nothing after reset_state."""
        strategy, count = self.under_test(), self.replicas()
        with strategy.scope():
            total, mean = keras.metrics.Sum(), keras.metrics.Mean()
            accuracy = keras.metrics.BinaryAccuracy()

        @tf.function
        def step(rows: tf.Tensor) -> None:
            total.update_state(rows)
            mean.update_state(rows)
            accuracy.update_state(tf.ones_like(rows), tf.cast(rows >= 2, tf.float32))

        size = 4 * count
        dataset = tf.data.Dataset.from_tensor_slices(np.arange(size, dtype="float32"))
        for batch in strategy.experimental_distribute_dataset(dataset.batch(2 * count)):
            strategy.run(step, args=(batch,))
        expect("the sum of all rows", float(total.result()), size * (size - 1) / 2)
        expect("the mean of all rows", float(mean.result()), (size - 1) / 2)
        expect_close("the accuracy of all rows", float(accuracy.result()), (size - 2) / size, 1e-6)
        mean.reset_state()
        expect("the mean after reset_state", float(mean.result()), 0.0)

    def _training(self, model: str, optimizer: str) -> Training:
        def make() -> Training:
            return Training(model, optimizer, lambda build: distribute(build, self.under_test()))

        return self._kept(f"{model} {optimizer}", make)

    def _expect_as_on_one_device(self, model: str, optimizer: str) -> None:
        training = self._training(model, optimizer)
        for size, right in on_one_device(model, optimizer).items():
            found = training.anew(SIZES[size])
            for name, value in right.items():
                expect_close(f"{size}, {name}", found[name], value, self.tolerance)
        for weight in training.plain.weights:
            one, *others = self.under_test().experimental_local_results(weight.value)
            for copy in others:
                expect_close(f"a copy of {weight.path}", copy.numpy(), one.numpy(), 0)
