"""Trainings by fit and by a loop by hand, in turn in the same worker; steps/s of each, by round.

Arguments: the name of a model, rows of a global batch, steps of a training, rounds. The result is
a line of JSON: a list of rounds.
"""

import json
import sys
import time

import first_models
import hand_loop

import tfdist_ext as tfd

name = sys.argv[1]
rows, steps, rounds = map(int, sys.argv[2:])
x, y = first_models.batch(name, rows * steps)
strategy = hand_loop.strategy_of("multi_worker_mirrored", 2)


def compiled():
    model = first_models.compiled(name)
    model.compile(model.optimizer, model.loss, metrics=["accuracy"], jit_compile=False)
    return model


run = hand_loop.hand_loop(strategy, compiled, x, y, rows)
model = tfd.distribute(compiled, strategy)
trainings = {
    "fit": lambda: model.fit(x, y, batch_size=rows, verbose=0),
    "by hand": lambda: run(steps),
}


def speed(what):
    begun = time.perf_counter()
    trainings[what]()
    return steps / (time.perf_counter() - begun)


def both(number):
    order = list(trainings) if number % 2 else list(reversed(trainings))
    return {what: speed(what) for what in order}


for number in range(2):
    both(number)
print(json.dumps([both(number) for number in range(rounds)]), flush=True)
