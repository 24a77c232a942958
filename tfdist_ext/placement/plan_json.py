"""A plan as text: JSON of one line for each variable, so that a diff shows what has moved."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from tfdist_ext.errors import PlacementError
from tfdist_ext.messages import shown
from tfdist_ext.placement.rules import Rule, placement_from
from tfdist_ext.placement.specs import Held, Place, VariableSpec

if TYPE_CHECKING:
    from tfdist_ext.placement.placement_plan import PlacementPlan

__all__ = ["dump", "fingerprint", "load"]

_FORMAT = "tfdist_ext placement plan"
_VERSION = 1
_WHERE = "the placement plan"
# Fields of a variable that are left out where they have the usual value: large plans stay readable.
_USUAL = {"slots": 0, "load": None, "slot_bytes": 0, "trainable": True, "embedding": False}


def dump(plan: PlacementPlan) -> str:
    """The plan as JSON."""
    fields = ("tasks", "devices", "budgets", "policy", "fingerprint")
    head = {"format": _FORMAT, "version": _VERSION}
    head |= {name: getattr(plan, name) for name in fields}
    variables = []
    for spec, place in zip(plan.specs, plan.places, strict=True):
        line: dict[str, Any] = {"path": spec.path, "shape": spec.shape, "dtype": spec.dtype}
        unusual = (name for name, usual in _USUAL.items() if getattr(spec, name) != usual)
        line |= {name: getattr(spec, name) for name in unusual}
        if place.held is not Held.PIECES:
            line["held"] = place.held.value
        line["tasks"] = place.tasks
        if rule := plan.fixed.get(spec.path):
            line["rule"] = [rule.pattern, str(rule.placement)]
        variables.append(json.dumps(line))
    text = json.dumps(head, indent=1)[:-2]  # without the closing brace
    body = f'{text},\n "variables": [' + ",".join(f"\n  {line}" for line in variables) + "\n ]"
    return f'{body},\n "sha256": "{_digest(json.loads(body + "}"))}"\n}}\n'


def load(text: str) -> dict[str, Any]:
    """The fields of a PlacementPlan in a text that `dump` wrote.

    Raises:
        PlacementError: no JSON, not a plan, of another version, with a field that cannot be right,
            which is named, or changed after it was written.
    """
    if not isinstance(text, str):
        raise PlacementError(f"{_WHERE} must be a text, got {shown(text)}.")
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise PlacementError(
            f"{_WHERE} must be JSON, got an error at line {error.lineno}, column {error.colno}:"
            f" {error.msg}. Write it with to_json()."
        ) from None
    except (RecursionError, ValueError) as error:
        raise PlacementError(f"{_WHERE} cannot be read: {error}.") from None
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise PlacementError(
            f'{_WHERE} must have "format": "{_FORMAT}", got {shown(content)}: this is another kind'
            " of file."
        )
    if content.get("version") != _VERSION:
        raise PlacementError(
            f"{_WHERE} must be of version {_VERSION}, got version {shown(content.get('version'))}."
            " Plan again with this package."
        )
    fields = _fields(content)
    if content.get("fingerprint") != fingerprint(fields["specs"]):
        raise _changed("paths, shapes or dtypes are not those of its fingerprint")
    if content.get("sha256") != _digest({k: v for k, v in content.items() if k != "sha256"}):
        raise _changed("its content is not what its sha256 says")
    return fields


def fingerprint(specs: Iterable[VariableSpec]) -> str:
    """sha256 over path, shape and dtype of every variable, in any order."""
    lines = sorted(f"{spec.path}\0{spec.shape}\0{spec.dtype}\n" for spec in specs)
    return hashlib.sha256("".join(lines).encode("utf-8", "backslashreplace")).hexdigest()


def _fields(content: dict[str, Any]) -> dict[str, Any]:
    tasks = _field(content, "tasks", _from_one(int), "an integer of at least 1")
    devices = _field(content, "devices", _list_or_none(str), "a list of names or null")
    budgets = _field(content, "budgets", _list_or_none(int), "a list of bytes or null")
    for name, values in (("devices", devices), ("budgets", budgets)):
        if values is not None and len(values) != tasks:
            raise _changed(f"{name!r} must have {tasks} entries, got {len(values)}")
    lines = _field(content, "variables", lambda value: isinstance(value, list), "a list")
    specs, places, fixed = [], [], {}
    for number, line in enumerate(lines):
        if not isinstance(line, dict):
            raise _changed(f"variables[{number}] must be an object, got {shown(line)}")
        spec, place, rule = _variable(line, number, tasks)
        specs.append(spec)
        places.append(place)
        if rule is not None:
            fixed[spec.path] = rule
    if len({spec.path for spec in specs}) < len(specs):
        raise _changed("each path must stand once, got one twice")
    return dict(
        specs=tuple(specs),
        places=tuple(places),
        tasks=tasks,
        devices=None if devices is None else tuple(devices),
        budgets=None if budgets is None else tuple(budgets),
        fixed=fixed,
        policy=_field(content, "policy", lambda value: isinstance(value, str), "a name"),
    )


def _variable(
    line: dict[str, Any], number: int, tasks: int
) -> tuple[VariableSpec, Place, Rule | None]:
    name = f"variables[{number}] ({shown(line.get('path'))})"
    try:
        fields = {name: line[name] for name in _USUAL if name in line}
        spec = VariableSpec(line["path"], line["shape"], line["dtype"], **fields)
        place = Place(tuple(line["tasks"]), Held(line.get("held", Held.PIECES.value)))
        rule = line.get("rule")
        made = None if rule is None else Rule(rule[0], placement_from(rule[1]))
    except (KeyError, TypeError, ValueError, IndexError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else str(error).rstrip(".")
        raise _changed(f"{name}: {what}") from None
    if not all(type(task) is int and 0 <= task < tasks for task in place.tasks):
        raise _changed(f"{name} must be on tasks below {tasks}, got {shown(place.tasks)}")
    most = {Held.PIECES: max(spec.rows, 1), Held.COPIES: tasks, Held.OWNED: 1}[place.held]
    if not 1 <= len(place.tasks) <= most:
        raise _changed(
            f"{name} of {spec.rows} rows must be on 1 to {most} tasks, got {len(place.tasks)}"
        )
    return spec, place, made


def _changed(what: str) -> PlacementError:
    return PlacementError(
        f"{_WHERE} was changed after it was written: {what}. Plan again, with rules for what you"
        " want elsewhere."
    )


def _digest(content: dict[str, Any]) -> str:
    """The sha256 of the content, without its spaces and line ends."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _field(content: dict[str, Any], name: str, right: Callable[[Any], bool], what: str) -> Any:
    if name not in content or not right(content[name]):
        raise _changed(f"{name!r} must be {what}, got {shown(content.get(name))}")
    return content[name]


def _list_or_none(kind: type) -> Callable[[object], bool]:
    return lambda value: (
        value is None or (isinstance(value, list) and all(type(item) is kind for item in value))
    )


def _from_one(*kinds: type) -> Callable[[Any], bool]:
    return lambda value: type(value) in kinds and value >= 1
