"""Trains all cells of the matrix on one strategy and writes what comes out to a file.

    python tests/exactness/train.py NAME OUT [--keras] [--optimizers NAME ...]

NAME is `one process` for Keras without a strategy, `multi_worker_mirrored` in the tasks of a
cluster, another strategy's name, or one with its number of logical CPUs, as in `mirrored_3`; that
of PlacedStrategy with one of the RULES, as in `placed-mixed_4`. With --keras the strategy is used
by Keras's own fit.
"""

from __future__ import annotations

import argparse
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import matrix
import tensorflow as tf

import tfdist_ext as tfd

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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("out", type=Path)
    parser.add_argument("--keras", action="store_true")
    parser.add_argument("--optimizers", nargs="*", default=list(matrix.OPTIMIZERS))
    arguments = parser.parse_args()
    if arguments.name[-1].isdigit():
        cpu = tf.config.list_physical_devices("CPU")[0]
        one = tf.config.LogicalDeviceConfiguration()
        tf.config.set_logical_device_configuration(cpu, [one] * int(arguments.name[-1]))
    distribute = wrapper(arguments.name, arguments.keras)
    cells = dict(matrix.train_all(distribute, arguments.optimizers, go_on=arguments.keras))
    chief = arguments.name != "multi_worker_mirrored" or (
        tf.distribute.cluster_resolver.TFConfigClusterResolver().task_id == 0
    )
    if chief:
        arguments.out.write_bytes(pickle.dumps(cells))


if __name__ == "__main__":
    main()
