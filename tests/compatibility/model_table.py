"""The table of real models: what is measured of each, as a line of docs/compatibility.md."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from model_rows import rows
from two_steps import BOUND, Trained, difference, train_in_task, train_on_replicas

from tfdist_ext.testing import TaskError, run_tasks

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"
BEGIN, END = "<!-- models begin -->\n", "<!-- models end -->"
HEAD = (
    "| model | parameters | lines changed | mirrored 2 | mirrored 3 | workers 2 |"
    " parameter server | first step, of Keras's | |\n|---|---|---|---|---|---|---|---|---|\n"
)
# A change of the inputs is one rounding; a sum in another order has one in each of its operations.
OF_ROUNDING = 100
LIMIT = 1800  # seconds for one process
LARGE = 10_000_000  # parameters; from here on not on clusters, where each task has a copy
CLUSTERS = {"workers 2": {"worker": 2}, "parameter server": {"worker": 1, "ps": 1}}
# One of each kind of layer and step: convolutions with BatchNormalization, attention with dropout,
# a decoder, tables, ranking, rows of all replicas, steps and callbacks of the user's.
TENTH = [
    "keras.applications: MobileNetV2",
    "KerasHub: Bert",
    "KerasHub: Llama",
    "KerasHub: ViT",
    "KerasRS: DotInteraction",
    "KerasRS: PairwiseHingeLoss",
    "KerasTuner: GridSearch",
    "guides: GAN",
    "guides: SimCLR",
    "guides: diffusion",
    "guides: Keras's callbacks",
]


class Measured(NamedTuple):
    """A line of the table, and whether all that it shows has a reason."""

    line: str
    is_explained: bool


def titles_with(parts: Sequence[str]) -> list[str]:
    return [title for title in rows() if not parts or any(part in title for part in parts)]


def measure(title: str) -> Measured:
    """Train a model in processes of its own."""
    row = rows()[title]
    env = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
    try:
        (found,) = run_tasks(train_on_replicas, None, LIMIT, args=(title,), env=env).values()
    except TaskError as error:  # the others are measured all the same
        return Measured(f"| {title} | | {row.lines} | {_shown(str(error))} | | | | | |", False)
    figures: list[float | str | None] = list(found.differences)
    in_third = list(rows()).index(title) % 3 == 0
    on_clusters = in_third and row.on_clusters and found.plain.parameters < LARGE
    for cluster in CLUSTERS.values():
        figures.append(_on(title, cluster, env, found.plain) if on_clusters else None)
    reason = row.reason
    if found.rounding and not reason:
        reason = f"rounding: the last bit of the inputs makes {found.rounding:.0e} in Keras itself"
    bound = max(BOUND, OF_ROUNDING * found.rounding)
    within = all(each is None or (isinstance(each, float) and each <= bound) for each in figures)
    equal = within and not found.rounding
    cells = [
        title,
        f"{found.plain.parameters:,}" if found.plain.parameters else "",
        str(row.lines),
        *map(_shown, figures),
        f"{found.seconds / found.plain.seconds:.1f}",
        "" if equal else reason,
    ]
    return Measured(f"| {' | '.join(cells)} |", within or bool(row.reason))


def _on(title: str, cluster: dict[str, int], env: dict[str, str], plain: Trained) -> float | str:
    try:
        results = run_tasks(train_in_task, cluster, LIMIT, args=(title,), env=env).values()
    except TaskError as error:
        return str(error)
    return difference(next(each for each in results if each is not None), plain)


def _shown(figure: float | str | None) -> str:
    if isinstance(figure, str):
        return "fails: " + re.sub(r"[\s|]+", " ", figure)[-200:]  # the end says what was raised
    return "" if figure is None else "0" if figure == 0 else f"{figure:.0e}"


def write(title: str, line: str) -> None:
    """Put a line into the page, in the order of the rows."""
    head, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    body, rest = rest.split(END)
    lines = {text.split(" | ")[0].removeprefix("| "): text for text in body.splitlines()[2:]}
    lines[title] = line
    known = "".join(f"{lines[one]}\n" for one in rows() if one in lines)
    PAGE.write_text(f"{head}{BEGIN}{HEAD}{known}{END}{rest}", encoding="utf-8")
