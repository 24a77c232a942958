"""WorkersPlan: speed and memory for each number of workers; as numbers, table and picture."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from textwrap import fill, indent
from typing import Any, NamedTuple

from tfdist_ext.messages import counted
from tfdist_ext.placement.placement_plan import save_figure
from tfdist_ext.placement.scaling import Network, StepCost, rate_text, step_seconds
from tfdist_ext.placement.specs import columns, size_text
from tfdist_ext.user_frames import filter_traceback

_CLOSE = 0.95  # of the largest speedup: fewer workers are as good
_GAIN = 1.05  # a smaller speedup is no gain
_FASTER = (10, 100)  # times the bandwidth, which the advice tries
_BOTH = (False, True)


class Estimate(NamedTuple):
    """The computed speed and memory of one number of workers.

    Attributes:
        workers: the number of workers.
        same_batch: whether all workers share the global batch of one worker. Otherwise each worker
            has a batch of this size.
        narrow: whether gradients travel in 16 bits (`gradient_dtype`).
        sharded: whether workers share the optimizer's slots (`shard_optimizer=True`).
        seconds: the time of a step.
        examples_per_second: of all workers.
        efficiency: `examples_per_second` relative to as many workers that need no communication.
        memory: the bytes of variables, slots and gradients on a worker, without activations.
    """

    workers: int
    same_batch: bool
    narrow: bool
    sharded: bool
    seconds: float
    examples_per_second: float
    efficiency: float
    memory: int


@filter_traceback
@dataclass(frozen=True)
class WorkersPlan:
    """The speed of a model on several workers, computed by `plan_workers`. Print it as a table.

    Attributes:
        step: the measured step on one device, its gradients and its variables.
        network: the network, and how steps use it.
        workers: the numbers of workers, sorted.
        gradient_dtype: the type of 16 bits that the table compares with.
    """

    step: StepCost
    network: Network
    workers: tuple[int, ...]
    gradient_dtype: str = "bfloat16"

    def estimate(
        self,
        workers: int,
        *,
        same_batch: bool = False,
        narrow: bool = False,
        sharded: bool = False,
    ) -> Estimate:
        """Returns the speed and memory for a number of workers. See `Estimate` for arguments."""
        step = self.step
        rows = -(-step.rows // workers) if same_batch else step.rows
        examples = step.rows if same_batch else step.rows * workers
        options = {"narrow": narrow, "sharded": sharded}
        seconds = max(step_seconds(step, self.network, workers, rows, **options), 1e-9)
        efficiency = examples * step.seconds / (seconds * step.rows * workers)
        memory = step.memory(workers, sharded=sharded)
        speed = examples / seconds
        return Estimate(workers, same_batch, narrow, sharded, seconds, speed, efficiency, memory)

    @property
    def advice(self) -> str:
        """One or two sentences about what to do."""
        more = [workers for workers in self.workers if workers > 1]
        if not more:
            return "Plan more than one worker, such as --workers 1,2,4."
        text, is_faster = self._speed_text(more)
        text += f" (global batch {self.step.rows})."
        for factor in () if is_faster else _FASTER:
            network = replace(self.network, bandwidth=self.network.bandwidth * factor)
            on_faster, is_faster = replace(self, network=network)._speed_text(more)
            if is_faster:
                return f"{text} {on_faster}."
        times = self.estimate(more[-1]).efficiency * more[-1]
        return (
            f"{text} With {self.step.rows} examples for each worker, {more[-1]} workers would"
            f" process {times:.1f} times as many examples per second as one."
        )

    def save_picture(self, path: str | os.PathLike[str]) -> None:
        """Draws examples per second over the number of workers, as .svg or .png.

        Raises:
            PlacementError: the path has another suffix, the file cannot be written, or matplotlib
                is not installed.
        """
        save_figure(path, self._figure)

    def __str__(self) -> str:
        step, dtype = self.step, self.gradient_dtype
        titles = ["examples/s", "efficiency"]
        head = ["workers", "", f"{step.rows} each", *titles, f"{step.rows} in all", *titles]
        lines = [[*head, "memory"]]
        for workers in self.workers:
            for sharded, narrow in itertools.product(*[_BOTH[: min(workers, 2)]] * 2):
                setting = ["fit", dtype, "sharded", "both"][2 * sharded + narrow]
                cells = ["" if narrow or sharded else str(workers), setting]
                for same_batch in _BOTH:
                    estimate = self.estimate(
                        workers, same_batch=same_batch, narrow=narrow, sharded=sharded
                    )
                    speed = estimate.examples_per_second
                    cells += [_time(estimate.seconds), f"{speed:,.{0 if speed >= 100 else 1}f}"]
                    cells += [f"{estimate.efficiency:.0%}"]
                lines.append([*cells, size_text(estimate.memory)])
        table = indent(columns(lines, "><>>>>>>>"), "  ")
        notes = (
            f"{step.rows} each, {step.rows} in all: a step of {step.rows} examples for each worker"
            f" or in all. {dtype}: with gradient_dtype. sharded: with"
            " shard_optimizer=True. memory: variables, slots and gradients of a worker, without"
            " activations."
        )
        return "\n\n".join([self._title(), table, fill(notes, 100), fill(self.advice, 100)])

    def _title(self) -> str:
        step = self.step
        rows = f" and {step.table_ids} rows of tables" if step.table_ids else ""
        return (
            f"{counted(step.rows, 'example')} in {_time(step.seconds)} on one device,"
            f" {size_text(step.dense_bytes)} of gradients{rows},"
            f" {rate_text(self.network.bandwidth)}, latency {_time(self.network.latency)}"
        )

    def _speed_text(self, choices: Sequence[int]) -> tuple[str, bool]:
        """What workers would gain, with one global batch, and whether they would gain anything."""
        (best, speedup), (narrow_best, narrow_speedup) = map(self._best, [choices] * 2, _BOTH)
        is_faster = speedup >= _GAIN
        compared = "slower than" if speedup < 1 else "no faster than"
        compared = f"{speedup:.1f} times as fast as" if is_faster else compared
        text = f"On {rate_text(self.network.bandwidth)}, {best} workers would be {compared} one"
        narrow_is_faster = narrow_speedup >= _GAIN * max(speedup, 1.0)
        if narrow_is_faster:
            text += f", {'and' if is_faster else 'but'} {narrow_best} workers {narrow_speedup:.1f}"
            text += f' times as fast with gradient_dtype="{self.gradient_dtype}"'
        return text, is_faster or narrow_is_faster

    def _best(self, choices: Sequence[int], narrow: bool) -> tuple[int, float]:
        """The number of workers that is fastest, or about as fast and smaller; its speedup."""
        speedups = {
            workers: self.estimate(workers, same_batch=True, narrow=narrow).efficiency * workers
            for workers in choices
        }
        fastest = max(speedups.values())
        return next(item for item in speedups.items() if item[1] >= _CLOSE * fastest)

    def _figure(self) -> Any:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 4.5))
        axes = figure.add_subplot()
        axes.set_title(self._title(), fontsize=10, loc="left")
        one = self.step.rows / self.step.seconds if self.step.seconds else 0.0
        axes.plot(self.workers, [one * n for n in self.workers], ":", color="grey", label="ideal")
        for same_batch, narrow in itertools.product(_BOTH, repeat=2):
            speeds = [
                self.estimate(n, same_batch=same_batch, narrow=narrow).examples_per_second
                for n in self.workers
            ]
            name = "same global batch" if same_batch else "same batch for each worker"
            name += f", {self.gradient_dtype}" * narrow
            style = f"C{int(same_batch)}{'--' if narrow else '-'}o"
            axes.plot(self.workers, speeds, style, label=name)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xticks(self.workers, labels=[str(n) for n in self.workers])
        axes.yaxis.set_major_formatter("{x:,.4g}")
        axes.set_xlabel("workers")
        axes.set_ylabel("examples per second")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize=8)
        return figure


def _time(seconds: float) -> str:
    """A readable time, such as "1.35 s", "350 ms" or "50 us"."""
    power = 0 if seconds >= 1 else 1 if seconds >= 1e-3 else 2
    return f"{seconds * 1000**power:.3g} {('s', 'ms', 'us')[power]}"
