"""Keras's callbacks, History and progress bar work as in Keras's own fit."""

from __future__ import annotations

from pathlib import Path

import keras
import numpy as np
import pytest
from training_cases import (
    CLASSIFIER,
    X,
    Y,
    assert_same_history,
    assert_same_weights,
    classifier,
    distributed_fit,
    mirrored,
    plain_fit,
    steps_taken,
)

import tfdist_ext as tfd

# Keras saves weights of several replicas through an old NumPy protocol.
SAVES = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
FIT = {"batch_size": 16, "epochs": 3}


@SAVES
def test_common_callbacks_do_as_in_keras(tmp_path: Path) -> None:
    def callbacks(who: str) -> list[keras.callbacks.Callback]:
        return [
            keras.callbacks.EarlyStopping(patience=1, restore_best_weights=True),
            keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * (3 if epoch else 1)),
            keras.callbacks.ReduceLROnPlateau("loss", patience=1),
            keras.callbacks.ModelCheckpoint(tmp_path / f"{who}.keras", save_best_only=True),
            keras.callbacks.CSVLogger(tmp_path / f"{who}.csv"),
        ]

    # Labels of the validation are turned around, so that training soon makes it worse.
    arguments = {"batch_size": 16, "epochs": 9, "validation_data": (X[48:], 1 - Y[48:])}
    data = X[:48], Y[:48]
    plain, expected = plain_fit(CLASSIFIER, *data, callbacks=callbacks("plain"), **arguments)
    ours, history = distributed_fit(CLASSIFIER, *data, callbacks=callbacks("ours"), **arguments)
    assert_same_history(expected, history)
    assert len(history["loss"]) < 9  # stopped early
    assert_same_weights(plain, ours)  # the best ones, taken back
    saved = [keras.models.load_model(tmp_path / f"{who}.keras") for who in ("plain", "ours")]
    assert_same_weights(*saved)
    assert_same_weights(saved[0], ours)
    tables = [np.genfromtxt(tmp_path / f"{who}.csv", delimiter=",") for who in ("plain", "ours")]
    np.testing.assert_allclose(*tables, atol=1e-6)


class Watching(keras.callbacks.Callback):
    """Notes what can be seen at the end of each batch."""

    def __init__(self):
        super().__init__()
        self.seen: list[list[float]] = []
        self.names: list[str] = []

    def on_train_batch_end(self, batch, logs=None):
        loss, compiled = (metric.result() for metric in self.model.metrics)
        self.names = list(logs)
        metrics = [float(loss), float(compiled["accuracy"])]
        self.seen.append([batch, *logs.values(), *metrics, steps_taken(self.model)])


def test_a_callback_sees_each_batch_with_the_metrics_so_far() -> None:
    watching, expected = Watching(), Watching()
    plain_fit(CLASSIFIER, X, Y, batch_size=16, epochs=2, callbacks=[expected])
    distributed_fit(CLASSIFIER, X, Y, batch_size=16, epochs=2, callbacks=[watching])
    assert len(watching.seen) == 8
    assert watching.names == expected.names
    np.testing.assert_allclose(watching.seen, expected.seen, atol=1e-6)


def test_a_callback_reads_numbers_as_on_one_device() -> None:
    """`float` of Keras's variables, which ask their tf.Variable, in and outside of `fit`."""
    halved = keras.optimizers.schedules.ExponentialDecay(0.5, 4, 0.5, staircase=True)
    optimizers = [
        keras.optimizers.SGD(0.1),
        keras.optimizers.SGD(halved),
    ]
    seen = []

    class Reads(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            optimizer, bias = self.model.optimizer, self.model.weights[-1]
            numbers = [float(optimizer.learning_rate), int(optimizer.iterations)]
            assert complex(optimizer.iterations) == float(optimizer.iterations) == numbers[1]
            assert float(np.asarray(optimizer.learning_rate)) == pytest.approx(numbers[0])
            assert float(bias[0]) == bias.numpy()[0] == self.model.get_weights()[-1][0]
            seen.append(numbers)
            if len(seen) == 1:
                optimizer.learning_rate = 0.25

    for optimizer in optimizers:
        plain = classifier()()
        plain.compile(optimizer, "mse")
        ours = tfd.distribute(plain, mirrored(2))
        ours.fit(X, Y, batch_size=16, epochs=2, callbacks=[Reads()], verbose=0)
    assert np.ravel(seen).tolist() == pytest.approx([0.1, 4, 0.25, 8, 0.25, 4, 0.125, 8])


def test_a_callback_on_batches_is_called_after_each_execution_of_steps_per_execution() -> None:
    """Other callbacks than those of batches: test_in_cluster.py."""
    begun: list[int] = []
    every_eight = classifier(steps_per_execution=8)
    seen = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: begun.append(batch)
    )
    tfd.distribute(every_eight, mirrored()).fit(X, Y, batch_size=2, verbose=0, callbacks=[seen])
    assert begun == [7, 15, 23, 31]


class StopOn(keras.callbacks.Callback):
    """Stops the training in the second call (or another) of a hook."""

    def __init__(self, hook: str, call: int = 2):
        super().__init__()
        self.calls = -call
        setattr(self, hook, self.called)

    def called(self, *_, **__):
        self.calls += 1
        if self.calls == 0:
            self.model.stop_training = True


@pytest.mark.parametrize(
    ("hook", "steps"),
    [
        ("on_train_batch_end", 2),
        ("on_test_end", 8),
    ],
)
def test_stop_training_stops_at_the_step_of_keras(hook: str, steps: int) -> None:
    def arguments():
        return {**FIT, "callbacks": [StopOn(hook)], "validation_data": (X[:16], Y[:16])}

    plain, expected = plain_fit(CLASSIFIER, X, Y, **arguments())
    ours, history = distributed_fit(CLASSIFIER, X, Y, **arguments())
    assert steps_taken(ours) == steps_taken(plain) == steps
    assert_same_history(expected, history)


def test_verbose_prints_as_keras_does(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = {"batch_size": 16, "epochs": 2, "validation_data": (X, Y)}
    ours, _ = distributed_fit(CLASSIFIER, X, Y, **arguments)
    ours.predict(X, verbose=0)
    ours.evaluate(X, Y, verbose=0)
    assert capsys.readouterr().out == ""
    ours.fit(X, Y, verbose=2, **arguments)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" - ")[0] for line in lines] == ["Epoch 1/2", "4/4", "Epoch 2/2", "4/4"]
    assert all(name in lines[1] for name in ("accuracy: ", "loss: ", "val_loss: "))
    ours.fit(X, Y, verbose="auto", **arguments)
    out = capsys.readouterr().out
    assert out.count("Epoch 2/2") == 1
    assert "4/4" in out


@pytest.mark.parametrize("case", ["all", "one", "train_on_batch", "evaluate"])
def test_a_callback_changes_the_metrics_of_a_running_epoch(case: str) -> None:
    """An evaluation does not: the metrics of the epoch stay what they are."""

    class Changes(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 2 and case == "one":
                self.model.metrics[0].reset_state()

        def on_train_batch_end(self, batch, logs=None):
            if batch == 1 and case == "all":
                self.model.reset_metrics()
            if batch == 1 and case == "train_on_batch":
                self.model.train_on_batch(X[:8], Y[:8])
            # Keras's own fit loses its metrics by an evaluation.
            if batch == 1 and case == "evaluate" and isinstance(self.model, tfd.DistributedModel):
                self.model.evaluate(X[:13], Y[:13], verbose=0)

    plain, expected = plain_fit(CLASSIFIER, X, Y, callbacks=[Changes()], **FIT)
    ours, history = distributed_fit(CLASSIFIER, X, Y, callbacks=[Changes()], **FIT)
    assert_same_history(expected, history)
    assert_same_weights(plain, ours)


def test_a_callback_that_compiles_the_model_again_is_refused() -> None:
    model = tfd.distribute(classifier(), mirrored())
    again = keras.callbacks.LambdaCallback()
    again.on_test_batch_end = lambda *_, **__: again.model.compile("sgd", "binary_crossentropy")
    data = {"x": X, "y": Y, "callbacks": [again], "verbose": 0}
    with pytest.raises(tfd.TrainingError, match=r"compile\(\) was called while \w+\(\) is"):
        model.fit(**data, epochs=2, validation_data=(X, Y))
    with pytest.raises(tfd.TrainingError, match=r"while evaluate\(\) is running"):
        model.evaluate(**data)
