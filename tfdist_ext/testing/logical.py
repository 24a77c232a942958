"""Whether this process can have a number of logical CPUs, or TensorFlow has started with another."""

from __future__ import annotations

from tfdist_ext.errors import StrategyError

__all__ = ["can_have_cpus"]


def can_have_cpus(count: int) -> bool:
    """Make TensorFlow see this many CPUs in this process, unless it has started with others."""
    from tfdist_ext.testing.devices import logical_cpus

    try:
        logical_cpus(count)
    except StrategyError:
        return False
    return True
