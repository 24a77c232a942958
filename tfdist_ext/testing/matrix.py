"""The strategies that tests are run on, by name: mirrored_2, central_3, mwms_2."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tfdist_ext.errors import StrategyError

__all__ = ["DEFAULT", "Case", "case_of", "strategy_matrix"]

DEFAULT = ("one_device", "mirrored_2", "central_3", "mwms_2")

# Kind -> name for create_strategy.
_KINDS = {
    "one_device": "one_device",
    "mirrored": "mirrored",
    "central": "central_storage",
    "template": "template",
    "placed": "placed",
    "mwms": "multi_worker_mirrored",
}


@dataclass(frozen=True)
class Case:
    """A strategy of the matrix.

    Attributes:
        name: as "mirrored_2".
        kind: as "mirrored".
        replicas: in all.
    """

    name: str
    kind: str
    replicas: int

    @property
    def workers(self) -> int:
        """Processes that it needs, 0 where it runs in any process."""
        return self.replicas if self.kind == "mwms" else 0

    @property
    def logical_cpus(self) -> int:
        """CPUs that it needs in its process."""
        return 1 if self.kind in ("mwms", "one_device") else self.replicas

    def make(self) -> Any:
        """The strategy, in a process that has what it needs."""
        from tfdist_ext.strategies import StrategyTemplate, create_strategy

        if self.kind == "mwms":
            return create_strategy("multi_worker_mirrored")
        if self.kind == "one_device":
            return create_strategy("one_device")
        devices = [f"CPU:{number}" for number in range(self.replicas)]
        if self.kind == "template":
            return StrategyTemplate(devices)
        return create_strategy(_KINDS[self.kind], devices=devices)


def case_of(name: str) -> Case:
    """The case of a name.

    Raises:
        StrategyError: there is none of that name.
    """
    match = re.fullmatch(r"([a-z_]+?)(?:_([1-9][0-9]*))?", name.strip())
    kind, count = match.groups() if match else ("", None)
    if kind not in _KINDS or (count is None) != (kind == "one_device"):
        raise StrategyError(
            f"there is no strategy {name!r} for tests; they are one_device, and with the number of"
            f" replicas {', '.join(f'{kind}_2' for kind in _KINDS if kind != 'one_device')}."
        )
    return Case(name.strip(), kind, int(count or 1))


def strategy_matrix(*names: str) -> dict[str, Callable[[], Any]]:
    """Name -> what makes the strategy, for those that are named, or those of the fixture."""
    return {name: case_of(name).make for name in names or DEFAULT}
