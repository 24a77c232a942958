"""What checks share: the strategy under test, steps to run on it, and comparisons."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import tensorflow as tf

from tfdist_ext.errors import StrategyError
from tfdist_ext.strategies.one_machine import seen_devices

__all__ = [
    "RUN_MODES",
    "StrategyCase",
    "expect_equal",
    "local_values",
    "probe_sums",
    "reduction_probe",
    "replica_number",
    "run",
]

RUN_MODES = ("eager", "tf.function around", "tf.function within")


def run(strategy: tf.distribute.Strategy, step: Callable[..., Any], mode: str, *args: Any) -> Any:
    """Call `strategy.run` in one of the RUN_MODES: eagerly, in a tf.function, or of one."""
    if mode == "eager":
        return strategy.run(step, args=args)
    if mode == "tf.function around":
        return tf.function(lambda: strategy.run(step, args=args))()
    return strategy.run(tf.function(step), args=args)


def local_values(strategy: tf.distribute.Strategy, value: Any) -> list[Any]:
    """The value of each replica, or of each copy of a variable, as Python numbers or lists."""
    return [
        part.numpy().tolist() if hasattr(part, "numpy") else part
        for part in strategy.experimental_local_results(value)
    ]


def replica_number() -> tf.Tensor:
    """1.0 on the first replica, 2.0 on the second, and so on."""
    context = tf.distribute.get_replica_context()
    return tf.cast(context.replica_id_in_sync_group, tf.float32) + 1


def reduction_probe() -> dict[str, tf.Tensor]:
    """Values of this replica that a faulty reduction changes: 64 bits, and several axes."""
    own = replica_number()
    return {
        "int64": tf.cast(own, tf.int64) + 2**24,  # float32 cannot hold it
        "float64": tf.cast(own, tf.float64) + 2.0**-40,
        "rank 3": tf.fill([2, 1, 3], own),
    }


def probe_sums(count: int) -> dict[str, Any]:
    """The sums of `reduction_probe()` over this many replicas, as Python numbers and lists."""
    total = count * (count + 1) // 2
    return {
        "int64": total + count * 2**24,
        "float64": total + count * 2.0**-40,
        "rank 3": [[[float(total)] * 3]] * 2,
    }


def expect_equal(what: str, got: Any, wanted: Any) -> None:
    """Raise AssertionError, which names `what`, unless `got` equals `wanted`."""
    __tracebackhide__ = True
    if got != wanted:
        raise AssertionError(f"{what}: must be {wanted!r}, got {got!r}.")


class StrategyCase:
    """The base of all checks: the strategy under test, and comparisons.

    Attributes:
        tolerance: the largest difference of trained weights, losses and metrics from those of one
            device, relative to the largest number of each variable or log.
    """

    tolerance: float = 1e-6
    _made: ClassVar[tf.distribute.Strategy]

    def strategy(self) -> tf.distribute.Strategy:
        """Return the strategy to be tested, with two replicas or more."""
        raise NotImplementedError(
            f"{type(self).__name__} has no method `strategy`: define one that returns the strategy"
            " to be tested."
        )

    def under_test(self) -> tf.distribute.Strategy:
        """The strategy of `strategy()`, the same one in all checks of a class."""
        # vars(): the strategy of a base class is not this class's.
        if "_made" not in vars(type(self)):
            type(self)._made = self._checked_strategy()
        return type(self)._made

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
