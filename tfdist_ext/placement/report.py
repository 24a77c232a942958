"""A plan as a person reads it before any machine is paid for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from textwrap import indent

from tfdist_ext.messages import counted
from tfdist_ext.placement.assignment import Assignment
from tfdist_ext.placement.sizes import size_text
from tfdist_ext.placement.specs import Held, VariableSpec

__all__ = ["columns", "fullest_and_emptiest", "largest_of", "table"]

_MOST_TASKS = 64  # more are shown by the fullest and the emptiest
_ENDS = 8
_LARGEST = 10
_LISTED = 6


def table(plan: Assignment) -> str:
    """Bytes, variables and shards by task; the imbalance; the largest variables; the rules."""
    where = "ps tasks" if plan.devices is None else "devices"
    slots = any(spec.bytes > spec.weight_bytes for spec in plan.specs)
    held = sum(plan.bytes_by_task)
    parts = [
        f"{len(plan.specs)} variables, {size_text(held)}{' with optimizer slots' * slots}, on"
        f" {plan.tasks} {where}",
        indent(columns(_by_task(plan), left=1), "  "),
        f"imbalance {plan.imbalance:.3f} (fullest over mean bytes)",
    ]
    if any(plan.load_by_task):
        parts[-1] += f"\nimbalance of load {plan.load_imbalance:.3f}"
    largest = [
        [spec.path, str(spec.shape), size_text(spec.bytes), _places_text(plan, spec)]
        for spec in largest_of(plan, _LARGEST)
    ]
    if largest:
        parts.append("largest variables\n" + indent(columns(largest, left=2), "  "))
    by_rule = Counter((rule.pattern, str(rule.placement)) for rule in plan.fixed.values())
    if by_rule:
        fixed = [[*rule, counted(count, "variable")] for rule, count in by_rule.items()]
        parts.append("decided by rules\n" + indent(columns(fixed, left=3), "  "))
    return "\n\n".join(parts)


def _places_text(plan: Assignment, spec: VariableSpec) -> str:
    """Where one variable is, in a few words: "ps 2", "4 pieces: ps 0, ps 1, ps 3, ps 5"."""
    place = plan.places[plan.index_of(spec.path)]
    names = [plan.names()[task] for task in sorted(set(place.tasks))]
    if place.held is Held.COPIES:
        return "on every device"
    if place.held is Held.OWNED:
        return f"on every device, owner {names[0]}"
    if len(place.tasks) == 1:
        return names[0]
    listed = ", ".join(names[:_LISTED]) + ", ..." * (len(names) > _LISTED)
    return f"{len(place.tasks)} pieces: {listed}"


def _by_task(plan: Assignment) -> list[list[str]]:
    mean = sum(plan.bytes_by_task) / plan.tasks
    variables: Counter[int] = Counter()
    shards: Counter[int] = Counter()
    for place in plan.places:
        variables.update(set(place.tasks if place.held is Held.PIECES else range(plan.tasks)))
        if len(place.tasks) > 1 and place.held is Held.PIECES:
            shards.update(place.tasks)
    loads = any(plan.load_by_task)
    head = ["", "bytes", "of mean", "variables", "shards"]
    lines = [head + ["load"] * loads + ["budget"] * (plan.budgets is not None)]
    few = plan.tasks <= _MOST_TASKS
    for task in range(plan.tasks) if few else fullest_and_emptiest(plan, _ENDS):
        held = plan.bytes_by_task[task]
        of_mean = f"{held / mean:.3f}" if mean else "-"
        counts = [str(variables[task]), str(shards[task])]
        line = [plan.names()[task], size_text(held), of_mean, *counts]
        if loads:
            line.append(f"{plan.load_by_task[task]:.4g}")
        if plan.budgets is not None:
            line.append(size_text(plan.budgets[task]))
        lines.append(line)
    if not few:
        lines.insert(1 + _ENDS, ["..."] + [""] * (len(lines[0]) - 1))
    return lines


def fullest_and_emptiest(plan: Assignment, each: int) -> list[int]:
    """`n` of the fullest tasks and as many of the emptiest, by index."""
    by_bytes = sorted(range(plan.tasks), key=lambda task: (-plan.bytes_by_task[task], task))
    return by_bytes[:each] + by_bytes[-each:]


def largest_of(plan: Assignment, most: int) -> list[VariableSpec]:
    """The largest variables with their slots, largest first."""
    return sorted(plan.specs, key=lambda spec: (-spec.bytes, spec.path))[:most]


def columns(lines: Sequence[Sequence[str]], left: int) -> str:
    """Lines of cells in columns: the first `left` and the last cells of text to the left."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    numbers = [
        all(line[place][:1].isdigit() or not line[place] for line in lines[1:])
        for place in range(len(widths))
    ]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if place >= left and numbers[place] else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
