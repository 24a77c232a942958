"""Strategies on the template, each with another hook of its own, for its tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist_ext.strategies import StrategyTemplate


class Mixed(StrategyTemplate):
    """Every second variable, by its name, is kept once, on the last device."""

    def create_variable(self, spec: Any, create: Any, beside: Any = None) -> Any:
        if beside is None and sum(map(ord, spec.path)) % 2:
            return create(self.devices[-1:])
        return super().create_variable(spec, create, beside)


class Shared(StrategyTemplate):
    """One copy of everything, on a device that has no replica."""

    def create_variable(self, spec: Any, create: Any, beside: Any = None) -> Any:
        return create("CPU:3")


class Owned(StrategyTemplate):
    """Updated on the second device, where the slots are, and sent out."""

    def create_variable(self, spec: Any, create: Any, beside: Any = None) -> Any:
        return create(self.devices if beside is None else self.devices[1:2])

    def update_variable(
        self, variable: Any, copies: Sequence[Any], update: Callable[[int], Any]
    ) -> list[Any]:
        owner = min(1, len(copies) - 1)
        done = update(owner)
        for copy in copies:
            if copy is not copies[owner]:
                with tf.device(copy.device):
                    copy.assign(copies[owner])
        return [done] * len(copies)


class ReadAsMean(StrategyTemplate):
    """What is read, and saved, is the mean of the copies."""

    def read_variable(self, variable: Any, copies: Sequence[Any]) -> Any:
        total = tf.add_n([copy.read_value() for copy in copies])
        return tf.cast(total / len(copies), variable.dtype)


class Pairwise(StrategyTemplate):
    """Sums pairs of neighbors first, then the pairs; remembers what it was asked."""

    def __init__(self, devices: Any = None):
        self.asked: list[tuple[Any, int, tuple[str, ...]]] = []
        super().__init__(devices)

    def reduce_values(self, op: Any, values: Sequence[Any], devices: Sequence[str]) -> list[Any]:
        self.asked.append((op, len(values), tuple(devices)))
        if any(isinstance(value, tf.IndexedSlices) for value in values):
            return list(super().reduce_values(op, values, devices))
        level = list(values)
        while len(level) > 1:
            level = [sum(level[i : i + 2][1:], level[i]) for i in range(0, len(level), 2)]
        mean = op == tf.distribute.ReduceOp.MEAN
        return [level[0] / len(values) if mean else level[0]] * len(devices)


class OwnedAndPairwise(Owned, Pairwise):
    """The hooks of both."""
