"""Trains with `fit` and with a hand-written loop, alternately, and prints the seconds.

Arguments: the name of a model, the methods separated by commas ("fit,hand-written loop"), rows of a
global batch, rounds, steps of a short and of a long training. The result is a line of JSON: a list
of rounds, each {steps: {method: seconds}}.
"""

import json
import sys
import time

import first_models
import hand_loop

import tfdist_ext as tfd

name, contestants = sys.argv[1], sys.argv[2].split(",")
rows, rounds, *lengths = map(int, sys.argv[3:])
data = {steps: first_models.batch(name, rows * steps) for steps in lengths}
if contestants == ["fit"]:
    strategy = tfd.create_strategy()
else:
    strategy = hand_loop.strategy_of("multi_worker_mirrored", 2)


def compiled():
    model = first_models.compiled(name)
    model.compile(model.optimizer, model.loss, metrics=["accuracy"], jit_compile=False)
    return model


trainings = {}
if "hand-written loop" in contestants:
    loop = hand_loop.hand_loop(strategy, compiled, *data[lengths[-1]], rows)
    trainings["hand-written loop"] = loop
if "fit" in contestants:
    model = tfd.distribute(compiled, strategy)
    trainings["fit"] = lambda steps: model.fit(*data[steps], batch_size=rows, verbose=0)


def seconds(what, steps):
    begun = time.perf_counter()
    trainings[what](steps)
    return time.perf_counter() - begun


def both(number, steps):
    order = list(trainings) if number % 2 else list(reversed(trainings))
    return {what: seconds(what, steps) for what in order}


for number in range(2):
    for steps in lengths:
        both(number, steps)
found = [{steps: both(number, steps) for steps in lengths} for number in range(rounds)]
print(json.dumps(found), flush=True)
