"""Trains a model with and without more work per step, alternately; prints ms per step.

Arguments: the model's name, replicas (0: by Keras's own fit), rows of a global batch, steps of a
training, and rounds. Each training has a new model, because two traces of one step differ in speed
by some percent.
"""

import json
import sys
import time

import first_models
import keras

import tfdist_ext as tfd

NAME = sys.argv[1]
replicas, rows, steps, rounds = map(int, sys.argv[2:])
KERAS_OPTIONS = {} if replicas else {"steps_per_execution": 64}
x, y = first_models.batch(NAME, rows * steps)
MORE = {
    "plain": {},
    "three more metrics": {},
    "sample weights": {"sample_weight": (y + 1.0) / 10},
    "class weights": {"class_weight": {number: (number + 1.0) / 10 for number in range(10)}},
    "validation": {"validation_data": (x[: 4 * rows], y[: 4 * rows])},
}


class StepsOfTraining(keras.callbacks.Callback):
    """Seconds of an epoch's steps, without those of a validation."""

    def on_epoch_begin(self, epoch, logs=None):
        self.begun, self.ended = time.perf_counter(), None

    def on_test_begin(self, logs=None):
        self.ended = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        self.seconds = (self.ended or time.perf_counter()) - self.begun


def ms_a_step(what):
    def compiled():
        model = first_models.compiled(NAME)
        metrics = ["accuracy"]
        if what == "three more metrics":
            metrics += [keras.metrics.SparseTopKCategoricalAccuracy(k=k) for k in (2, 3, 5)]
        model.compile(model.optimizer, model.loss, metrics=metrics, **KERAS_OPTIONS)
        return model

    model = tfd.distribute(compiled, strategy) if replicas else compiled()

    watch = StepsOfTraining()
    for _ in range(3):  # the last one counts
        model.fit(x, y, batch_size=rows, verbose=0, callbacks=[watch], **MORE[what])
    return 1e3 * watch.seconds / steps


options = {"logical_cpus": replicas} if replicas > 1 else {}
strategy = tfd.create_strategy("mirrored" if replicas > 1 else "one_device", **options)
ms_a_step("plain")  # the first fit of a process
print(json.dumps([{what: ms_a_step(what) for what in MORE} for _ in range(rounds)]))
