"""Trains the model of work.py with a hand-written loop. Argument: the strategy."""

import sys

import keras
import work
from hand_loop import hand_loop, strategy_of

strategy = strategy_of(sys.argv[1], 4)
train = hand_loop(strategy, lambda: work.mlp(keras), *work.data(), work.GLOBAL_BATCH)


def run_epochs(count):
    for _ in range(count):
        train(work.STEPS_PER_EPOCH)


work.report_speed(run_epochs)
