"""The strategy under test, made once for all checks of a class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import tensorflow as tf

from tfdist_ext.errors import StrategyError
from tfdist_ext.strategies.devices import seen_devices
from tfdist_ext.testing.conformance.strategy_probes import (
    RUN_MODES,
    expect_equal,
    local_values,
    run,
)

__all__ = ["StrategyCase"]


class StrategyCase:
    """The case of the checks: a strategy on one machine, and its tolerance.

    Attributes:
        tolerance: how far trained weights, losses and metrics may be from those of one device;
            relative to the largest number of its variable where that is above 1.
    """

    tolerance: float = 1e-6
    _cache: ClassVar[dict[str, Any]]

    def strategy(self) -> tf.distribute.Strategy:
        """The strategy to be tested; with two replicas or more, for numbers that tell."""
        raise NotImplementedError(
            f"{type(self).__name__} has no method `strategy`: define one that returns the strategy"
            " to be tested."
        )

    def under_test(self) -> tf.distribute.Strategy:
        """The strategy of `strategy()`, the same one in all checks."""
        return self._cached("strategy", self._checked_strategy)

    def replicas(self) -> int:
        """Number of replicas in sync."""
        return int(self.under_test().num_replicas_in_sync)

    def variable(self, value: Any, aggregation: str = "NONE", **options: Any) -> tf.Variable:
        """A variable made in the strategy's scope."""
        with self.under_test().scope():
            return tf.Variable(value, aggregation=tf.VariableAggregation[aggregation], **options)

    def numbers(self) -> list[float]:
        """The `replica_number` of each replica: 1.0 to N."""
        return [float(number) for number in range(1, self.replicas() + 1)]

    def expect_values(self, what: str, value: Any, wanted: list[Any]) -> None:
        """Raise AssertionError unless the replicas, or the copies, have these values."""
        expect_equal(what, local_values(self.under_test(), value), wanted)

    def expect_run(
        self, what: str, step: Callable[..., Any], wanted: list[Any], *args: Any
    ) -> None:
        """Raise AssertionError unless `step` gives the replicas these values, in each mode."""
        for mode in RUN_MODES:
            self.expect_values(f"{what}, {mode}", run(self.under_test(), step, mode, *args), wanted)

    def _checked_strategy(self) -> tf.distribute.Strategy:
        name = f"{type(self).__name__}.strategy"
        made = self.strategy()
        if not isinstance(made, tf.distribute.Strategy):
            raise StrategyError(f"{name} must return a tf.distribute.Strategy, got {made!r}.")
        # TensorFlow's own strategies silently use the first CPU for devices that do not exist.
        seen, devices = seen_devices(), made.extended.worker_devices
        missing = [name for each in devices if (name := each.rpartition("device:")[2]) not in seen]
        if missing:
            cpus = [int(device[4:]) + 1 for device in missing if device.startswith("CPU:")]
            raise StrategyError(
                f"{name} must return a strategy on devices of this process ({', '.join(seen)}), got"
                f" {', '.join(missing)}."
                + (f" Call tfdist_ext.testing.logical_cpus({max(cpus)}) first." if cpus else "")
            )
        return made

    def _cached(self, name: str, make: Callable[[], Any]) -> Any:
        """The result of `make`, called once for each class: strategies and steps take seconds."""
        # vars(): what a base class keeps is not this class's.
        kept = vars(type(self)).get("_cache")
        if kept is None:
            kept = type(self)._cache = {}
        if name not in kept:
            kept[name] = make()
        return kept[name]
