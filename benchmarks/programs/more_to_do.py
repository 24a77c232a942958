"""Trainings of one model with more to do in a step, and without, in turn; ms a step of each.

Arguments: replicas, rows of a global batch, steps of a training, and trainings of each.
"""

import json
import sys
import time

import first_models
import keras

import tfdist_ext as tfd

replicas, rows, steps, trainings = map(int, sys.argv[1:])
NAME = "MLP 64-256-10"
x, y = first_models.batch(NAME, rows * steps)
MORE = {
    "plain": {},
    "three metrics more": {},
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


def trainer(strategy, what):
    def compiled():
        model = first_models.compiled(NAME)
        metrics = ["accuracy"]
        if what == "three metrics more":
            metrics += [keras.metrics.SparseTopKCategoricalAccuracy(k=k) for k in (2, 3, 5)]
        model.compile(model.optimizer, model.loss, metrics=metrics)
        return model

    model = tfd.distribute(compiled, strategy)

    def train():
        watch = StepsOfTraining()
        model.fit(x, y, batch_size=rows, verbose=0, callbacks=[watch], **MORE[what])
        return 1e3 * watch.seconds / steps

    return train


options = {"logical_cpus": replicas} if replicas > 1 else {}
strategy = tfd.create_strategy("mirrored" if replicas > 1 else "one_device", **options)
train = {what: trainer(strategy, what) for what in MORE}
for each in train.values():
    each(), each()
print(json.dumps([{what: each() for what, each in train.items()} for _ in range(trainings)]))
