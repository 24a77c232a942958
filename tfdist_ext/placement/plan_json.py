"""A plan as JSON: one line for each variable, so that a diff shows what has moved."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from tfdist_ext.errors import PlacementError
from tfdist_ext.messages import shown
from tfdist_ext.placement.specs import Held, Place, VariableSpec

__all__ = ["dump", "load"]

_FORMAT = "tfdist_ext placement plan, version 1"


def dump(fields: Mapping[str, Any]) -> str:
    """The fields of a PlacementPlan as JSON."""
    head = {"format": _FORMAT, **{name: fields[name] for name in ("tasks", "devices", "budget")}}
    variables = []
    for spec, place in zip(fields["specs"], fields["places"], strict=True):
        line = {**asdict(spec), "held": place.held.value, "on": place.tasks}
        variables.append(json.dumps(line))
    text = json.dumps(head, indent=1)[:-2]  # without the closing brace
    body = f'{text},\n "variables": [' + ",".join(f"\n  {line}" for line in variables) + "\n ]"
    return f'{body},\n "sha256": "{_digest(json.loads(body + "}"))}"\n}}\n'


def load(text: str) -> dict[str, Any]:
    """The fields of a PlacementPlan in a text that `dump` wrote.

    Raises:
        PlacementError: the text is not JSON, not a plan, or of another version, or it was changed
            after it was written.
    """
    try:
        content = json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise PlacementError(
            f"the placement plan must be JSON, as to_json() writes it, got {shown(text)}: {error}."
        ) from None
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise PlacementError(
            f'the placement plan must have "format": "{_FORMAT}", got {shown(content)}. Plan again'
            " with this package."
        )
    if content.pop("sha256", None) != _digest(content):
        raise PlacementError(
            "the placement plan was changed after it was written: its sha256 does not match. Plan"
            " again, and use rules to move variables."
        )
    specs, places = [], []
    for line in content["variables"]:
        places.append(Place(tuple(line.pop("on")), Held(line.pop("held"))))
        specs.append(VariableSpec(**line))
    devices = content["devices"]
    return {
        "specs": tuple(specs),
        "places": tuple(places),
        "tasks": content["tasks"],
        "devices": None if devices is None else tuple(devices),
        "budget": content["budget"],
    }


def _digest(content: dict[str, Any]) -> str:
    """The sha256 of the content, without its spaces and line ends."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
