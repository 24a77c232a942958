"""The table of real models: what is measured of each, as a line of docs/compatibility.md."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from model_rows import rows
from two_steps import BOUND, LARGE, Compared, train_in_task, train_on_replicas

from tfdist_ext.testing import TaskError, run_tasks
from tfdist_ext.training.verify import ROUNDING_FACTOR

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"
BEGIN, END = "<!-- models begin -->\n", "<!-- models end -->"
HEAD = (
    "| model | parameters | lines changed | mirrored 2 | mirrored 3 | workers 2 |"
    " parameter server | first step, over Keras's | |\n|---|---|---|---|---|---|---|---|---|\n"
)
LIMIT = 1800  # seconds for the models that share a process
SHARING = 10  # models that share processes; those of keras.applications are too large
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


def in_processes(titles: Sequence[str]) -> Iterator[list[str]]:
    """Yields the models that share processes: each start and import takes seconds."""
    large = [title for title in titles if title.startswith("keras.applications:")]
    yield from ([title] for title in large)
    small = [title for title in titles if title not in large]
    yield from (small[n : n + SHARING] for n in range(0, len(small), SHARING))


def measure(titles: Sequence[str]) -> dict[str, Measured]:
    """Train models that share processes."""
    on_replicas = _run(train_on_replicas, None, titles)
    found = {title: each for title, each in on_replicas.items() if not isinstance(each, str)}
    on_clusters = [
        title
        for title, each in found.items()
        if rows()[title].on_clusters and each.parameters < LARGE and _in_third(title)
    ]
    figures: dict[str, list[float | str | None]] = {
        title: [*each.differences] for title, each in found.items()
    }
    for cluster in CLUSTERS.values():
        compared = _run(train_in_task, cluster, on_clusters) if on_clusters else {}
        for title, each in compared.items():
            figures[title] += [each] if isinstance(each, str) else each.differences
    return {
        title: _failed(title, each) if isinstance(each, str) else _line(title, each, figures[title])
        for title, each in on_replicas.items()
    }


def _in_third(title: str) -> bool:
    return list(rows()).index(title) % 3 == 0


def _run(
    function: Callable[..., Any], cluster: dict[str, int] | None, titles: Sequence[str]
) -> dict[str, Any]:
    """Runs a function in tasks; what it returns for each title, or why it failed."""
    env = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
    try:
        results = run_tasks(function, cluster, LIMIT, args=(titles,), env=env).values()
    except TaskError as error:  # the others are measured all the same
        return dict.fromkeys(titles, str(error))
    return next(each for each in results if each is not None)


def _failed(title: str, why: str) -> Measured:
    return Measured(f"| {title} | | {rows()[title].lines} | {_shown(why)} | | | | | |", False)


def _line(title: str, found: Compared, figures: list[float | str | None]) -> Measured:
    row = rows()[title]
    reason = row.reason
    if found.rounding and not reason:
        reason = f"rounding: changed last bits make {found.rounding:.0e} in Keras itself"
    bound = max(BOUND, ROUNDING_FACTOR * found.rounding)
    within = all(isinstance(each, float) and each <= bound for each in figures)
    equal = within and not found.rounding
    figures = [*figures, *[None] * 4][:4]
    cells = [
        title,
        f"{found.parameters:,}" if found.parameters else "",
        str(row.lines),
        *map(_shown, figures),
        f"{found.seconds[1] / found.seconds[0]:.1f}" if len(found.seconds) > 1 else "",
        "" if equal else reason,
    ]
    return Measured(f"| {' | '.join(cells)} |", within or bool(row.reason))


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
