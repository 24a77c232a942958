"""Trains all cells of the matrix on one strategy.

Its name is `one process` for Keras without a strategy, `multi_worker_mirrored` in the tasks of a
cluster, another strategy's name, or one with its number of logical CPUs, as in `mirrored_3`; that
of PlacedStrategy with one of the RULES, as in `placed-mixed_4`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import keras
import matrix
import tensorflow as tf

import tfdist_ext as tfd
from tfdist_ext.testing import logical_cpus

# Each rule matches in each model; what no rule matches is small, and mirrored.
RULES = {
    "owned": {".*": "owned"},
    "mixed": {".*/kernel": "owned", ".*/bias": "device CPU:1"},
    "pieces": {".*/kernel": "sharded(2)", ".*/bias": "sharded"},
}


def strategy_of(name: str) -> tf.distribute.Strategy:
    name, _, replicas = name.rpartition("_") if name[-1].isdigit() else (name, "", "")
    options: dict[str, Any] = {}
    if replicas:
        options["devices"] = [f"CPU:{i}" for i in range(int(replicas))]
    name, _, rules = name.partition("-")
    if rules:
        options["placement"] = RULES[rules]
    return tfd.create_strategy(name, **options)


def wrapper(name: str, by_keras: bool) -> Callable[[Callable[[], keras.Model]], Any]:
    """builder -> the model that trains on the named strategy."""
    if name == "one process":
        return lambda build: build()
    strategy = strategy_of(name)
    if not by_keras:
        return lambda build: tfd.distribute(build, strategy)

    def in_scope(build: Callable[[], keras.Model]) -> keras.Model:
        with strategy.scope():
            return build()

    return in_scope


def train_cells(
    name: str, by_keras: bool, optimizers: Sequence[str]
) -> dict[matrix.Cell, matrix.Trained | None]:
    """Train all cells of these optimizers on a strategy, in a process that it has to itself."""
    if name[-1].isdigit():
        logical_cpus(int(name[-1]))
    if by_keras:
        # MirroredStrategy hangs if Python drops one of its iterators while it builds a graph
        # (docs/tensorflow_facts.md).
        gc.disable()
    return dict(matrix.train_all(wrapper(name, by_keras), optimizers, go_on=by_keras))
