"""The strategies that tests run on, by names such as mirrored_2 and multi_worker_2."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tfdist_ext.errors import StrategyError
from tfdist_ext.user_frames import filter_traceback

DEFAULT = ("one_device", "mirrored_2", "central_storage_3", "multi_worker_2")

_KINDS = ("one_device", "mirrored", "central_storage", "template", "placed", "multi_worker")


@dataclass(frozen=True)
class Case:
    """A strategy of the matrix.

    Attributes:
        name: as "mirrored_2".
        kind: as "mirrored".
        replicas: the number of replicas on all workers.
    """

    name: str
    kind: str
    replicas: int

    @property
    def workers(self) -> int:
        """The number of processes of its cluster; 0 where it needs no cluster."""
        return self.replicas if self.kind == "multi_worker" else 0

    @property
    def logical_cpus(self) -> int:
        """The number of logical CPUs that it needs in each process."""
        return 1 if self.workers else self.replicas

    def make(self) -> Any:
        """Create the strategy; this process must have its devices and its TF_CONFIG."""
        from tfdist_ext.strategies import StrategyTemplate, create_strategy

        devices = [f"CPU:{number}" for number in range(self.replicas)]
        if self.kind == "template":  # it is not in the registry
            return StrategyTemplate(devices)
        if self.workers:
            return create_strategy("multi_worker_mirrored")
        return create_strategy(self.kind, devices=devices)


def case_of(name: str) -> Case:
    """The case of a name.

    Raises:
        StrategyError: no strategy has that name.
    """
    match = re.fullmatch(r"([a-z_]+?)(?:_([1-9][0-9]*))?", name.strip())
    kind, count = match.groups() if match else ("", None)
    if kind not in _KINDS or (count is None) != (kind == "one_device"):
        kinds = ", ".join(kind if kind == "one_device" else f"{kind}_2" for kind in _KINDS)
        raise StrategyError(
            f"a strategy for tests must be one of {kinds} (with any number of replicas), got"
            f" {name!r}."
        )
    return Case(name.strip(), kind, int(count or 1))


@filter_traceback
def strategy_matrix(*names: str) -> dict[str, Callable[[], Any]]:
    """Returns functions that create strategies for tests, by name.

    Args:
        names: names of strategies, such as "mirrored_2". By default, all strategies of the fixture
            `tfdist_strategy`.

    Returns:
        A dict from the name of each strategy to a function that creates it.

    Raises:
        StrategyError: a name is unknown.
    """
    return {name: case_of(name).make for name in names or DEFAULT}


@filter_traceback
def logical_cpus(count: int) -> None:
    """Creates a number of logical CPUs. Call it before the first TensorFlow operation.

    Raises:
        StrategyError: TensorFlow has already started with another number of CPUs.
    """
    from tfdist_ext.strategies.one_machine import make_logical_cpus

    make_logical_cpus(count)
