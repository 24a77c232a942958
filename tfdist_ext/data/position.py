"""How far a training is in its data: a few JSON fields, kept in a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from tfdist_ext.data.fingerprint import Fingerprint, difference
from tfdist_ext.data.shards import check_field
from tfdist_ext.errors import DataError
from tfdist_ext.messages import check_int, shown

__all__ = ["Position"]


@dataclass(frozen=True)
class Position:
    """A place in the order of examples; it says nothing about workers, so any number can go on.

    Attributes:
        seed: that of the order; None where it is the order of the data.
        epoch: the current one, from 0.
        examples: of this epoch, those behind: in the order, from its start, over all workers.
        fingerprint: of the data (`fingerprint.of_arrays`, `of_files`).

    Raises:
        DataError: a field that is no whole number from 0, or a fingerprint that is no JSON object.
    """

    seed: int | None
    epoch: int
    examples: int
    fingerprint: Fingerprint = field(hash=False)

    def __post_init__(self) -> None:
        if self.seed is not None:
            check_field(self, "seed", "the position's seed", high=2**63 - 1)
        for name in ("epoch", "examples"):
            check_field(self, name, f"the position's {name}")
        if not isinstance(self.fingerprint, Mapping):
            raise DataError(
                "the position's fingerprint must be an object with a field for each property of the"
                f" data, got {shown(self.fingerprint)}."
            )
        # As it comes back from JSON, so that a position equals the one that was saved.
        object.__setattr__(self, "fingerprint", json.loads(json.dumps(dict(self.fingerprint))))

    def to_state(self) -> dict[str, Any]:
        """The fields; `json.dumps` takes them."""
        return {one.name: getattr(self, one.name) for one in fields(self)}

    @classmethod
    def from_state(cls, state: object) -> Position:
        """The position of `to_state()`.

        Raises:
            DataError: not an object of these fields: names those that are missing or unknown.
        """
        if not isinstance(state, Mapping):
            raise DataError(
                f"the state of data must be a JSON object, got {shown(state)}; give what state()"
                " returned."
            )
        names = [one.name for one in fields(cls)]
        missing = [name for name in names if name not in state]
        unknown = [name for name in state if name not in names]
        if missing or unknown:
            said = [f"no {', '.join(missing)}"] if missing else []
            said += [f"unknown: {', '.join(map(shown, unknown))}"] if unknown else []
            raise DataError(
                f"the state of data must have the fields {', '.join(names)}, got {'; '.join(said)}."
                " It was written by another version of tfdist_ext, or is not a state of data."
            )
        return cls(**state)

    def check_data(self, fingerprint: Fingerprint) -> None:
        """Check that this is a position in the data with that fingerprint.

        Raises:
            DataError: the data has changed since the position was saved: names the difference.
        """
        changed = difference(self.fingerprint, json.loads(json.dumps(fingerprint)))
        if changed:
            raise DataError(
                f"the data has changed since this position was saved: {changed}. Example"
                f" {self.examples} of epoch {self.epoch} is not in the same place any more. Go on"
                " with the data as it was, or begin again without the saved position."
            )

    def after(self, examples: int, n: int) -> Position:
        """The position when that many more examples, of `n` an epoch, are behind.

        The end of an epoch is the start of the next.

        Raises:
            DataError: a number that is no whole one from 0, or no examples in an epoch.
        """
        more = check_int(examples, "the examples gone past", error=DataError)
        n = check_int(n, "the examples of an epoch", 1, error=DataError)
        epochs, rest = divmod(self.examples + more, n)
        return Position(self.seed, self.epoch + epochs, rest, self.fingerprint)
