"""Several devices where there is one CPU."""

from __future__ import annotations

from tfdist_ext.strategies.devices import make_logical_cpus

__all__ = ["logical_cpus"]


def logical_cpus(count: int) -> None:
    """Make TensorFlow see this many CPUs in this process: before its first operation.

    Raises:
        StrategyError: TensorFlow has started with another number.
    """
    make_logical_cpus(count)
