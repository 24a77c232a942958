"""Runs short trainings of one model; their times include start and end.

Arguments: "fit" or "hand-written loop", the strategy, the name of a model, rows of a global batch,
steps of a training, and "plain", "jit_compile" or "PlacedStrategy".
"""

import os
import statistics
import sys
import time

import first_models
import hand_loop

import tfdist_ext as tfd

how, kind, name, extra = *sys.argv[1:4], sys.argv[6]
rows, steps = map(int, sys.argv[4:6])
TRAININGS = int(os.environ["BENCHMARK_EPOCHS"])
REPLICAS = 4  # of a mirrored strategy
x, y = first_models.batch(name, rows * steps)


def compiled():
    model = first_models.compiled(name)
    jit_compile = extra == "jit_compile"
    model.compile(model.optimizer, model.loss, metrics=["accuracy"], jit_compile=jit_compile)
    return model


def by_fit():
    options = {"logical_cpus": REPLICAS} if kind == "mirrored" else {}
    strategy = tfd.create_strategy("placed" if extra == "PlacedStrategy" else kind, **options)
    model = tfd.distribute(compiled, strategy)

    def train():
        begun = time.perf_counter()
        model.fit(x, y, batch_size=rows, verbose=0)
        return time.perf_counter() - begun

    return train


def by_hand():
    strategy = hand_loop.strategy_of(kind, REPLICAS)
    run = hand_loop.hand_loop(strategy, compiled, x, y, rows)

    def train():
        begun = time.perf_counter()
        run(steps)
        return time.perf_counter() - begun

    return train


train = by_fit() if how == "fit" else by_hand()
for _ in range(2):
    train()
print(f"steps/s {steps / statistics.median(train() for _ in range(TRAININGS)):.2f}", flush=True)
