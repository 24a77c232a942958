"""A plan as JSON: one line for each variable, so that a diff shows what has moved."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from tfdist_ext.errors import PlacementError
from tfdist_ext.messages import shown
from tfdist_ext.placement.assignment import Assignment
from tfdist_ext.placement.rules import Rule, placement_from
from tfdist_ext.placement.specs import Held, Place, VariableSpec

__all__ = ["dump", "load"]

_FORMAT, _VERSION = "tfdist_ext placement plan", 1
# Fields of a variable that are left out if they have the usual value.
_USUAL = {"slots": 0, "load": None, "slot_bytes": 0, "trainable": True, "embedding": False}


def dump(plan: Assignment) -> str:
    """The plan as JSON."""
    head = {"format": _FORMAT, "version": _VERSION}
    head |= {name: getattr(plan, name) for name in ("tasks", "devices", "budgets")}
    variables = []
    for spec, place in zip(plan.specs, plan.places, strict=True):
        line: dict[str, Any] = {"path": spec.path, "shape": spec.shape, "dtype": spec.dtype}
        unusual = (name for name, usual in _USUAL.items() if getattr(spec, name) != usual)
        line |= {name: getattr(spec, name) for name in unusual}
        line |= {"held": place.held.value, "tasks": place.tasks}
        if rule := plan.fixed.get(spec.path):
            line["rule"] = [rule.pattern, str(rule.placement)]
        variables.append(json.dumps(line))
    text = json.dumps(head, indent=1)[:-2]  # without the closing brace
    body = f'{text},\n "variables": [' + ",".join(f"\n  {line}" for line in variables) + "\n ]"
    return f'{body},\n "sha256": "{_digest(json.loads(body + "}"))}"\n}}\n'


def load(text: str) -> dict[str, Any]:
    """The fields of a PlacementPlan in a text that `dump` wrote.

    Raises:
        PlacementError: no JSON, not a plan, of another version, or changed after it was written.
    """
    try:
        content = json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise PlacementError(
            f"the placement plan must be JSON, as to_json() writes it, got {shown(text)}: {error}."
        ) from None
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise PlacementError(
            f'the placement plan must have "format": "{_FORMAT}", got {shown(content)}: this is'
            " another kind of file."
        )
    if content.get("version") != _VERSION:
        raise PlacementError(
            f"the placement plan must be of version {_VERSION}, got version"
            f" {shown(content.get('version'))}. Plan again with this package."
        )
    if content.pop("sha256", None) != _digest(content):
        raise PlacementError(
            "the placement plan was changed after it was written: its content is not what its"
            " sha256 says. Plan again, with rules for what you want elsewhere."
        )
    specs, places, fixed = [], [], {}
    for line in content["variables"]:
        unusual = {name: line[name] for name in _USUAL if name in line}
        specs.append(VariableSpec(line["path"], line["shape"], line["dtype"], **unusual))
        places.append(Place(tuple(line["tasks"]), Held(line["held"])))
        if "rule" in line:
            fixed[line["path"]] = Rule(line["rule"][0], placement_from(line["rule"][1]))
    return dict(
        specs=tuple(specs),
        places=tuple(places),
        tasks=content["tasks"],
        devices=_tuple(content["devices"]),
        budgets=_tuple(content["budgets"]),
        fixed=fixed,
    )


def _tuple(values: list[Any] | None) -> tuple[Any, ...] | None:
    return None if values is None else tuple(values)


def _digest(content: dict[str, Any]) -> str:
    """The sha256 of the content, without its spaces and line ends."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
