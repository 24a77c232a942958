"""The processes that a test needs, according to its marks and its strategy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pytest

from tfdist_ext.errors import LaunchError, StrategyError
from tfdist_ext.testing.matrix import case_of, logical_cpus
from tfdist_ext.testing.tasks import check_timeout, tasks_of

__all__ = ["Needs", "needs_of"]


@dataclass(frozen=True)
class Needs:
    """The processes that a test needs.

    Attributes:
        cluster: numbers of tasks by type; None for one process without a cluster.
        logical_cpus: the number that each process sees; 0 for any number.
        timeout: seconds.
    """

    cluster: Mapping[str, int] | None = None
    logical_cpus: int = 0
    timeout: float = 60.0

    def are_met_here(self) -> bool:
        """Whether the test can run in this process; sets its logical CPUs if possible."""
        if self.cluster is not None:
            return False
        try:
            if self.logical_cpus:
                logical_cpus(self.logical_cpus)
        except StrategyError:  # TensorFlow has started with others
            return False
        return True


def needs_of(item: pytest.Item, strategy: str | None) -> Needs:
    """What a test needs.

    Args:
        strategy: name of the strategy that the fixture `tfdist_strategy` gives the test.

    Raises:
        TfDistError: its marks or its strategy are wrong, or contradict each other.
    """
    case = None if strategy is None else case_of(strategy)
    cpus = _cpus_of(item)
    if case is not None and case.logical_cpus > 1:
        cpus = max(cpus, case.logical_cpus)
    mark = item.get_closest_marker("tfdist_cluster")
    if mark is None:
        return Needs({"worker": case.workers} if case is not None and case.workers else None, cpus)
    counts = {"timeout": 60.0, **mark.kwargs}
    timeout = counts.pop("timeout")
    if mark.args or not counts:
        raise LaunchError(
            f"tfdist_cluster must get numbers of tasks by name, got {mark.args!r}: write"
            " @pytest.mark.tfdist_cluster(worker=2, ps=1)."
        )
    check_timeout(timeout)
    tasks_of(counts)
    if case is not None and case.workers not in (0, counts.get("worker")):
        raise StrategyError(
            f"the mark and the strategy of a test must agree on the number of workers, got"
            f" {counts} and {case.name}, which has {case.workers} workers: remove one of them."
        )
    return Needs(counts, cpus, timeout)


def _cpus_of(item: pytest.Item) -> int:
    """The number of the mark `tfdist_logical_cpus`; 0 without it."""
    mark = item.get_closest_marker("tfdist_logical_cpus")
    if mark is None:
        return 0
    if len(mark.args) != 1 or mark.kwargs or type(mark.args[0]) is not int or mark.args[0] < 1:
        got = ", ".join([*map(repr, mark.args), *(f"{k}={v!r}" for k, v in mark.kwargs.items())])
        raise StrategyError(
            f"tfdist_logical_cpus must get one integer from 1, got ({got}): write"
            " @pytest.mark.tfdist_logical_cpus(4)."
        )
    return mark.args[0]
