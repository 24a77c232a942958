"""Trains all cells of the matrix on one strategy."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import matrix

import tfdist_ext as tfd
from tfdist_ext.testing import logical_cpus


class Column(NamedTuple):
    """A strategy that every cell is trained on.

    Attributes:
        strategy: its name; "" for Keras without a strategy.
        replicas: logical CPUs of its process; 0 without any.
        rules: of PlacedStrategy. What no rule matches is small, and mirrored.
        workers: processes of its cluster; 0 without one.
        by_keras: trained by the `fit` of Keras, for comparison; nothing is promised of it.
        in_suite: optimizers that the test suite runs on it, with --long where it is not in QUICK.
    """

    strategy: str = ""
    replicas: int = 0
    rules: dict[str, str] | None = None
    workers: int = 0
    by_keras: bool = False
    in_suite: tuple[str, ...] = ()


def wrapper(column: Column) -> Callable[[Callable[[], keras.Model]], Any]:
    """builder -> the model that trains on the strategy of a column."""
    if not column.strategy:
        return lambda build: build()
    options: dict[str, Any] = {}
    if column.replicas:
        options["devices"] = [f"CPU:{number}" for number in range(column.replicas)]
    if column.rules:
        options["placement"] = column.rules
    strategy = tfd.create_strategy(column.strategy, **options)
    if not column.by_keras:
        return lambda build: tfd.distribute(build, strategy)

    def in_scope(build: Callable[[], keras.Model]) -> keras.Model:
        with strategy.scope():
            return build()

    return in_scope


def train_cells(
    column: Column, optimizers: Sequence[str]
) -> dict[matrix.Cell, matrix.Trained | None]:
    """Train all cells of these optimizers on a strategy, in a process that it has to itself."""
    if column.replicas:
        logical_cpus(column.replicas)
    if column.by_keras:
        # MirroredStrategy hangs if Python drops one of its iterators while it builds a graph
        # (docs/tensorflow_facts.md).
        gc.disable()
    return dict(matrix.train_all(wrapper(column), optimizers, go_on=column.by_keras))
