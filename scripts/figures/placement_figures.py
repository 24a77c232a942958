"""Figures of scripts/figures/placement_report: how evenly servers share the variables."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import tensorflow as tf
from placement_models import bert_large, criteo_tables, many_tables

from tfdist_ext import cli
from tfdist_ext.placement import PlacementPlan, VariableSpec, plan
from tfdist_ext.placement.live.learning import learn_specs
from tfdist_ext.placement.specs import size_text

PLAN, PLAN_END = "<!-- plan begin -->\n", "<!-- plan end -->\n"
TASKS = (2, 3, 8, 64)
MIN_SHARD_BYTES = 256 << 10  # TensorFlow's default
ALLOWED = 1.01
HEAD = (
    *("model with Adam's slots", "ps tasks", "round-robin", "greedy", "MinSizePartitioner"),
    *("shards", "planner", "shards", "lower bound"),
)


@dataclass(frozen=True)
class Row:
    """Fullest over mean bytes of one model on some tasks."""

    model: str
    size: int
    tasks: int
    round_robin: float
    greedy: float
    partitioned: float
    partitioned_pieces: int
    planner: float
    planner_pieces: int
    bound: float
    uncut: str

    @property
    def name(self) -> str:
        return f"{self.model} on {self.tasks}"

    @property
    def allowed(self) -> float:
        return max(ALLOWED, self.bound * (1 + 1e-9))

    def cells(self) -> list[str]:
        figures: list[float | int] = [self.round_robin, self.greedy]
        figures += [self.partitioned, self.partitioned_pieces, self.planner, self.planner_pieces]
        numbers = [f"{it:,}" if isinstance(it, int) else f"{it:.3f}" for it in figures]
        bound = f"{self.bound:.3f}: {self.uncut} cannot be cut" if self.bound > ALLOWED else ""
        model = f"{self.model}, {size_text(self.size)}"
        return [model, str(self.tasks), *numbers, bound]


def models() -> Iterator[tuple[str, list[VariableSpec]]]:
    """Keras's models as they are learned without values; the others from their shapes."""
    from keras.applications import EfficientNetB0, MobileNetV2, ResNet50

    yield "ResNet-50", learn_specs(lambda: ResNet50(weights=None), "adam")
    yield "MobileNetV2", learn_specs(lambda: MobileNetV2(weights=None), "adam")
    yield "EfficientNetB0", learn_specs(lambda: EfficientNetB0(weights=None), "adam")
    yield "BERT-large", bert_large()
    yield "26 Criteo tables", criteo_tables()


def measured() -> list[Row]:
    return [_row(name, specs, tasks) for name, specs in models() for tasks in TASKS]


def markdown(rows: list[Row]) -> str:
    """The table, and the seconds of a large plan."""
    lines = [list(HEAD), ["---", *["---:"] * 7, "---"], *(row.cells() for row in rows)]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    return (
        f"{table}\n\n100,000 variables on 1,000 tasks are planned in {_seconds(False):.1f} s of one"
        f" core, and in {_seconds(True):.1f} s where loads are balanced too."
    )


def write_example(page: Path) -> None:
    """Write what the command in the page prints, and its picture."""
    text = page.read_text(encoding="utf-8")
    lines = re.search(r"\$ (tfdist plan [^`]*)```", text)
    assert lines is not None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        status = cli.main(shlex.split(lines[1].replace("\\\n", " "))[1:])
    assert status == 0
    head, _, rest = text.partition(PLAN)
    end = rest[rest.index(PLAN_END) :]
    page.write_text(f"{head}{PLAN}\n```text\n{printed.getvalue().strip()}\n```\n{end}", "utf-8")


def _row(model: str, specs: list[VariableSpec], tasks: int) -> Row:
    partitioner = tf.distribute.experimental.partitioners.MinSizePartitioner(
        MIN_SHARD_BYTES, max_shards=tasks
    )
    whole = [1] * len(specs)
    pieces = [
        min(partitioner(tf.TensorShape(spec.shape), tf.as_dtype(spec.dtype))[0], spec.rows)
        if spec.shape
        else 1
        for spec in specs
    ]
    made = plan(specs, tasks)
    largest = max(specs, key=lambda spec: spec.row_bytes)
    return Row(
        model=model,
        size=sum(spec.bytes for spec in specs),
        tasks=tasks,
        round_robin=_imbalance(_in_turn(specs, whole, tasks)),
        greedy=_imbalance(_greedy(specs, tasks)),
        partitioned=_imbalance(_in_turn(specs, pieces, tasks)),
        partitioned_pieces=sum(pieces),
        planner=made.imbalance,
        planner_pieces=_pieces(made),
        bound=max(1.0, largest.row_bytes * tasks / sum(spec.bytes for spec in specs)),
        uncut=f"`{largest.path}` {largest.shape}" if largest.rows == 1 else "rows",
    )


def _in_turn(specs: list[VariableSpec], pieces: list[int], tasks: int) -> list[int]:
    """Bytes of each task if pieces go to tasks in turn, as TensorFlow does it."""
    sizes = [size for spec, n in zip(specs, pieces, strict=True) for size in spec.piece_bytes(n)]
    return [sum(sizes[task::tasks]) for task in range(tasks)]


def _greedy(specs: list[VariableSpec], tasks: int) -> list[int]:
    """Bytes of each task if each variable goes to the task with the fewest bytes so far."""
    held = [0] * tasks
    for spec in specs:
        held[held.index(min(held))] += spec.bytes
    return held


def _imbalance(held: list[int]) -> float:
    return max(held) * len(held) / sum(held)


def _pieces(made: PlacementPlan) -> int:
    return sum(len(place.tasks) for place in made.places)


def _seconds(loads: bool) -> float:
    """Processor time of a plan, the least of three: other work on the machine only ever adds."""
    specs = many_tables(100_000, loads)
    taken = []
    for _ in range(3):
        start = time.process_time()
        plan(specs, 1000)
        taken.append(time.process_time() - start)
    return min(taken)
