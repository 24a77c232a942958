"""A simulation of what each worker of a cluster reads, without data and without a cluster.

    print(report(Plan(examples=10**9, files=10_000, workers=4096, kill=3)))

All of it is arithmetic over ranges. A step's global batch is cut into the workers' parts; there are
two sizes of global batches, a full one and the last of the epoch, so the parts of two are looked
at, and those of the others are the same. The order of examples is a permutation, so positions that
are read once each are examples that are read once each.
"""

from __future__ import annotations

from dataclasses import dataclass

from tfdist_ext.data.shards import assign, bounds, imbalance
from tfdist_ext.errors import DataError
from tfdist_ext.messages import check_int

__all__ = ["Outcome", "Plan", "Reading", "report", "simulate"]

_OVERHEAD = 16  # bytes of a TFRecord beside its payload
_INDEX = 8  # bytes of a record's offset


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A training of one epoch, in which some workers are killed.

    Attributes:
        examples: of the data set.
        files: of about the same size.
        workers: at the start.
        global_batch_size: examples of a step, over all workers; 0 is 64 for each worker at the
            start.
        example_bytes: of an example's payload in its file.
        kill: workers that die, all at once; 0: nothing happens.
        resume_workers: that resume; 0: those that are left.
        kill_step: after how many steps; -1 is in the middle of the epoch.
        checkpoint_steps: between two checkpoints.

    Raises:
        DataError: a number that is no whole one or out of range; more workers die than there are.
    """

    examples: int
    files: int
    workers: int
    global_batch_size: int = 0
    example_bytes: int = 100_000
    kill: int = 0
    resume_workers: int = 0
    kill_step: int = -1
    checkpoint_steps: int = 1000

    def __post_init__(self) -> None:
        for name in ("examples", "files", "workers", "example_bytes", "checkpoint_steps"):
            check_int(getattr(self, name), name, 1, error=DataError)
        check_int(self.kill, "kill", 0, self.workers, error=DataError)
        for name in ("global_batch_size", "resume_workers"):
            check_int(getattr(self, name), name, error=DataError)
        if self.kill and not (self.resume_workers or self.workers - self.kill):
            raise DataError(
                f"kill must be less than the {self.workers} workers, got {self.kill}; or say how"
                " many start again: resume_workers."
            )
        if self.batch > self.examples:
            raise DataError(
                f"the global batch must be at most the {self.examples} examples, got {self.batch}."
            )
        check_int(self.kill_step, "kill_step", -1, self.steps, error=DataError)

    @property
    def batch(self) -> int:
        """Examples of a global batch."""
        return self.global_batch_size or 64 * self.workers

    @property
    def steps(self) -> int:
        """Steps of the epoch, a last smaller one included."""
        return -(-self.examples // self.batch)

    @property
    def record_bytes(self) -> int:
        """Bytes of an example in its file, with the record's header and footer."""
        return self.example_bytes + _OVERHEAD

    @property
    def killed_at(self) -> int:
        """Steps that were done when workers died."""
        return self.steps // 2 if self.kill_step < 0 else self.kill_step

    @property
    def saved_at(self) -> int:
        """Steps in the last checkpoint before that."""
        return self.killed_at - self.killed_at % self.checkpoint_steps

    @property
    def going_on(self) -> int:
        """Workers after the restart."""
        return self.resume_workers or self.workers - self.kill


@dataclass(frozen=True)
class Reading:
    """What the workers read over some steps.

    Attributes:
        first_step, last_step: [first, last).
        examples: of each worker.
        lost, doubled: positions that no worker reads, or more than one: counted in what they really
            cut, not derived from how it is cut.
    """

    first_step: int
    last_step: int
    examples: tuple[int, ...]
    lost: int
    doubled: int


@dataclass(frozen=True)
class Outcome:
    """The result of a plan.

    Attributes:
        whole: an epoch in which nothing happens.
        before: up to the last checkpoint before workers died; None where none did.
        again: from there to the moment they died: read once more after the restart.
        after: from there to the end, by those that resume.
        by_files: bytes of each worker, were whole files shared out instead of examples; None with
            fewer files than workers.
        lost, doubled: positions of the epoch, those of `before` and `after` or of `whole`.
    """

    whole: Reading
    before: Reading | None
    again: Reading | None
    after: Reading | None
    by_files: tuple[int, ...] | None
    lost: int
    doubled: int


def simulate(plan: Plan) -> Outcome:
    """Compute what each worker reads; in seconds, for thousands of workers."""
    whole = _read(plan, 0, plan.steps, plan.workers)
    before = again = after = None
    epoch = [whole]
    if plan.kill:
        before = _read(plan, 0, plan.saved_at, plan.workers)
        again = _read(plan, plan.saved_at, plan.killed_at, plan.going_on)
        after = _read(plan, plan.saved_at, plan.steps, plan.going_on)
        epoch = [before, after]
    by_files = None
    if plan.files >= plan.workers:
        ranges = [bounds(plan.examples, i, plan.files) for i in range(plan.files)]
        sizes = [(stop - start) * plan.record_bytes for start, stop in ranges]
        shares = assign(sizes, plan.workers)
        by_files = tuple(sum(sizes[i] for i in share) for share in shares)
    lost, doubled = sum(each.lost for each in epoch), sum(each.doubled for each in epoch)
    return Outcome(whole, before, again, after, by_files, lost, doubled)


def _read(plan: Plan, first: int, last: int, workers: int) -> Reading:
    """What `workers` read in steps [first, last)."""
    rest = plan.examples - (plan.steps - 1) * plan.batch  # examples of the last step
    has_last = last == plan.steps and first < last
    examples, lost, doubled = [0] * workers, 0, 0
    for size, times in ((plan.batch, last - first - has_last), (rest, int(has_last))):
        parts = [bounds(size, i, workers) for i in range(workers)]
        examples = [n + times * (b - a) for n, (a, b) in zip(examples, parts, strict=True)]
        uncovered, covered_twice = _gaps(parts, size)
        lost, doubled = lost + times * uncovered, doubled + times * covered_twice
    return Reading(first, last, tuple(examples), lost, doubled)


def _gaps(parts: list[tuple[int, int]], size: int) -> tuple[int, int]:
    """Of [0, size), how many numbers are in none of the ranges, and how many times one too many."""
    lost, doubled, reached = 0, 0, 0
    for start, stop in sorted(part for part in parts if part[0] < part[1]):
        lost += max(0, start - reached)
        doubled += max(0, min(stop, reached) - start)
        reached = max(reached, stop)
    return lost + max(0, size - reached), doubled + max(0, reached - size)


def report(plan: Plan) -> str:
    """The outcome as a text for a person."""
    found = simulate(plan)
    total = plan.examples * plan.record_bytes
    lines = [
        f"{plan.examples:,} examples of {_bytes(plan.example_bytes)} in {plan.files:,} files,"
        f" {_bytes(total)}; {plan.workers:,} workers, {plan.steps:,} steps of {plan.batch:,}"
        " examples",
        "",
        *_table(plan, found),
        "",
        f"the index: {_bytes((plan.examples + plan.files) * _INDEX)} in {plan.files:,} files,"
        " mapped and not loaded; the order is computed and needs no memory",
    ]
    if found.by_files is None:
        lines.append(f"whole files: not possible, {plan.files:,} for {plan.workers:,} workers")
    else:
        sizes = found.by_files
        lines.append(
            f"whole files, for comparison: {_bytes(min(sizes))} to {_bytes(max(sizes))} a worker,"
            f" largest over mean {imbalance(sizes):.4f}"
        )
    if found.again is not None:
        count = sum(found.again.examples)
        lines.append(
            f"killed: {plan.kill:,} of {plan.workers:,} workers after step {plan.killed_at:,}; the"
            f" last checkpoint is of step {plan.saved_at:,}; {plan.going_on:,} workers continue"
        )
        lines.append(
            f"read again: {plan.killed_at - plan.saved_at:,} steps, {count:,} examples,"
            f" {_bytes(count * plan.record_bytes)}: {count / plan.examples:.3%} of the epoch"
        )
    lines.append(
        f"trained on in the epoch: {plan.examples - found.lost:,} of {plan.examples:,} examples;"
        f" lost: {found.lost:,}, doubled: {found.doubled:,}"
    )
    return "\n".join(lines)


def _table(plan: Plan, found: Outcome) -> list[str]:
    rows = [("", "steps", "workers", "examples a worker", "bytes a worker", "largest/mean")]
    named = [("the epoch", found.whole), ("before", found.before), ("after", found.after)]
    for name, reading in named:
        if reading is not None:
            low, high = min(reading.examples), max(reading.examples)
            rows.append(
                (
                    name,
                    f"{reading.first_step:,} to {reading.last_step:,}",
                    f"{len(reading.examples):,}",
                    f"{low:,}" if low == high else f"{low:,} to {high:,}",
                    _bytes(high * plan.record_bytes),
                    f"{imbalance(reading.examples):.4f}",
                )
            )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def _bytes(count: float) -> str:
    """1,500 -> 1.50 kB; decimal units, as of disks."""
    units = ["B", "kB", "MB", "GB", "TB"]
    while count >= 1000 and len(units) > 1:
        count /= 1000
        del units[0]
    return f"{count:,.0f} B" if units[0] == "B" else f"{count:,.2f} {units[0]}"
