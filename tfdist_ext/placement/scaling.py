"""How fast a training would be on several workers, computed from one step and the network.

The functions are arithmetic without TensorFlow. Workers compute a step, and sum its gradients in
buckets. In a ring all-reduce each worker sends 2 (N-1)/N of the bytes, in 2 (N-1) messages. The sum
of a bucket starts when the gradients are ready and the bucket before it is summed.

Source: Patarasuk and Yuan 2009, https://doi.org/10.1016/j.jpdc.2008.09.002.
"""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from textwrap import fill, indent
from typing import Any, NamedTuple

from tfdist_ext.errors import PlacementError
from tfdist_ext.messages import counted, shown
from tfdist_ext.placement.placement_plan import save_figure
from tfdist_ext.placement.specs import columns, size_text
from tfdist_ext.user_frames import filter_traceback

# Of a bucket of gradients: a collective cuts a bucket into one part for each worker.
BYTES_PER_WORKER = 4 << 20
NARROW_BUCKETS = 4  # times smaller with `gradient_dtype`, which is faster on slow networks
_NARROW_ITEMSIZE = 2  # bytes of a bfloat16 and of a float16
_ID_BYTES = 8  # of the digits of an id (int32) beside its row
_NUMBER = r"\s*([0-9]{1,15}(?:\.[0-9]{1,9})?)\s*"
_RATE = re.compile(_NUMBER + r"([kKmMgGtT]?)(?:([bB]it|b)(?:/s|ps)?|B/s)\s*")
_SECONDS = re.compile(_NUMBER + r"(s|ms|us)\s*")
_UNITS_OF_SECONDS = {"s": 0, "ms": -3, "us": -6}
_CLOSE = 0.95  # of the largest speedup: fewer workers are as good
_GAIN = 1.05  # a smaller speedup is no gain
_BOTH = (False, True)


@dataclass(frozen=True, kw_only=True)
class Network:
    """A network between workers, and how a step uses it.

    Attributes:
        bandwidth: the bytes per second that a worker can send.
        latency: the seconds until a message arrives.
        usable: the fraction of the bandwidth that gradients get.
        host: the bytes per second that a worker's processor moves, in addition to the network.
        overhead: the seconds of a collective besides its messages.
        per_table: the seconds in which a worker prepares the rows of a table.
        bucket_bytes: the size of a bucket of gradients. 0 sums all gradients at once, except with
            `shard_optimizer`. None is the default on CPUs: 4 MiB times the number of workers, and
            a quarter with `gradient_dtype`.
        overlap: the last fraction of a step's computation, during which gradients become ready.
        straggling: the standard deviation of the computation's time between workers, relative to
            its mean. All workers wait for the slowest worker.
    """

    bandwidth: float
    latency: float = 1e-4
    usable: float = 0.9
    host: float = math.inf
    overhead: float = 5e-4
    per_table: float = 2e-4
    bucket_bytes: int | None = None
    overlap: float = 0.6
    straggling: float = 0.0

    def buckets(self, size: int, workers: int, *, narrow: bool, sharded: bool) -> int:
        """Returns the number of buckets of this many bytes of gradients or weights."""
        if self.bucket_bytes == 0 and not sharded:
            return 1
        usual = BYTES_PER_WORKER * workers
        if narrow and self.bucket_bytes is None:
            usual //= NARROW_BUCKETS
        return max(1, -(-size // (self.bucket_bytes or usual)))

    def seconds(self, sent: float, messages: int, collectives: int = 1) -> float:
        """Returns the time in which a worker sends bytes in messages, one after another."""
        sending = sent / (self.bandwidth * self.usable) + sent / self.host
        return sending + messages * self.latency + collectives * self.overhead


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """A training step of a model on one device.

    Attributes:
        seconds: the time of the step.
        rows: the number of examples of the step.
        fixed_seconds: the part of `seconds` that does not depend on the number of examples.
        dense_bytes: the bytes of the gradients of whole variables.
        table_values: the number of gradient values of the rows of tables that the examples read.
        table_ids: the number of these rows.
        tables: the number of these tables.
        trained_bytes: the bytes of the trained variables.
        other_bytes: the bytes of variables that are not trained.
        slot_bytes: the bytes of the optimizer's slots.
        itemsize: the bytes of a gradient's value.
    """

    seconds: float
    rows: int
    fixed_seconds: float = 0.0
    dense_bytes: int
    table_values: int = 0
    table_ids: int = 0
    tables: int = 0
    trained_bytes: int
    other_bytes: int = 0
    slot_bytes: int = 0
    itemsize: int = 4

    def computing(self, rows: int) -> float:
        """Returns the seconds of a step with this many examples on one device."""
        return self.fixed_seconds + (self.seconds - self.fixed_seconds) * rows / self.rows

    def gathered_bytes(self, rows: int, workers: int, *, narrow: bool) -> int:
        """Returns the bytes of the rows of tables of all workers, which are summed among zeros."""
        ratio = workers * rows / self.rows
        values, ids = math.ceil(self.table_values * ratio), math.ceil(self.table_ids * ratio)
        itemsize = min(self.itemsize, _NARROW_ITEMSIZE) if narrow else self.itemsize
        return _padded(values * itemsize + ids * _ID_BYTES, itemsize)

    def memory(self, workers: int, *, sharded: bool) -> int:
        """Returns the bytes of variables, slots and gradients on a worker, without activations."""
        slots = -(-self.slot_bytes // workers) if sharded else self.slot_bytes
        return self.trained_bytes + self.other_bytes + slots + self.dense_bytes


def step_seconds(
    step: StepCost,
    network: Network,
    workers: int,
    rows: int,
    *,
    narrow: bool = False,
    sharded: bool = False,
) -> float:
    """Returns the seconds of a step on several workers.

    Args:
        rows: the number of examples of each worker.
        narrow: gradients travel in a type of 16 bits (`gradient_dtype`).
        sharded: workers share the optimizer's slots (`shard_optimizer=True`).
    """
    seconds = step.computing(rows)
    if workers == 1:
        return seconds
    # The expected largest of N normal numbers.
    seconds *= 1 + network.straggling * math.sqrt(2 * math.log(workers))
    part = (workers - 1) / workers
    if step.dense_bytes:
        count = network.buckets(step.dense_bytes, workers, narrow=narrow, sharded=sharded)
        ratio = min(1.0, _NARROW_ITEMSIZE / step.itemsize) if narrow else 1.0
        sent = part * step.dense_bytes * ratio / count
        if sharded:
            reducing = network.seconds(sent, 1)  # an all-to-all, and each worker adds
        elif not narrow:
            reducing = network.seconds(2 * sent, 2 * (workers - 1))  # a ring
        elif workers == 2:
            reducing = network.seconds(2 * sent, 1)  # each sends all of the bucket to the other
        else:
            reducing = network.seconds(sent, 1) + network.seconds(sent, workers - 1)
        first = seconds * (1 - network.overlap * (1 - 1 / count))
        # Either the network works without a pause, or it waits for the last bucket.
        seconds = max(first + count * reducing, seconds + reducing)
    if step.table_ids:
        size = step.gathered_bytes(rows, workers, narrow=narrow)
        # Counts, then rows with their ids.
        seconds += network.seconds(2 * part * size, 4 * (workers - 1), 2)
        seconds += step.tables * network.per_table
    if sharded:
        count = network.buckets(step.trained_bytes, workers, narrow=narrow, sharded=True)
        seconds += network.seconds(part * step.trained_bytes, count * (workers - 1), count)
    return seconds


class Estimate(NamedTuple):
    """The computed speed and memory of a number of workers.

    Attributes:
        seconds: the time of a step.
        examples_per_second: of all workers.
        efficiency: `examples_per_second` relative to as many workers that need no communication.
        memory: the bytes of variables, slots and gradients on a worker, without activations.
    """

    seconds: float
    examples_per_second: float
    efficiency: float
    memory: int


@filter_traceback
@dataclass(frozen=True)
class WorkersPlan:
    """The speed of a model on several workers, computed by `plan_workers`. Print it as a table.

    Attributes:
        step: the step on one device, its gradients and its variables.
        network: the network, and how steps use it.
        workers: the numbers of workers, sorted.
    """

    step: StepCost
    network: Network
    workers: tuple[int, ...]

    def estimate(
        self, workers: int, *, same_batch: bool = False, narrow: bool = False, sharded: bool = False
    ) -> Estimate:
        """Returns the speed and memory of a number of workers.

        Args:
            same_batch: workers share the global batch of one worker. Otherwise each worker has a
                batch of this size.
            narrow: gradients travel in 16 bits (`gradient_dtype`).
            sharded: workers share the optimizer's slots (`shard_optimizer=True`).
        """
        step = self.step
        rows = -(-step.rows // workers) if same_batch else step.rows
        examples = step.rows if same_batch else step.rows * workers
        seconds = step_seconds(step, self.network, workers, rows, narrow=narrow, sharded=sharded)
        efficiency = examples * step.seconds / (seconds * step.rows * workers)
        memory = step.memory(workers, sharded=sharded)
        return Estimate(seconds, examples / seconds, efficiency, memory)

    @property
    def advice(self) -> str:
        """One or two sentences about what to do."""
        more = [workers for workers in self.workers if workers > 1]
        if not more:
            return "Plan more than one worker, such as --workers 1,2,4."
        text, is_faster = self._speed_text(more)
        text += f" (global batch {self.step.rows})."
        if not is_faster:
            network = replace(self.network, bandwidth=self.network.bandwidth * 10)
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
        rows, titles = self.step.rows, ["examples/s", "efficiency"]
        head = ["workers", "", f"{rows} each", *titles, f"{rows} in all", *titles, "memory"]
        lines = [head]
        for workers in self.workers:
            for sharded, narrow in itertools.product(*[_BOTH[: min(workers, 2)]] * 2):
                cells = ["" if narrow or sharded else str(workers)]
                cells.append(["fit", "bfloat16", "sharded", "both"][2 * sharded + narrow])
                settings = {"narrow": narrow, "sharded": sharded}
                for same_batch in _BOTH:
                    result = self.estimate(workers, same_batch=same_batch, **settings)
                    speed = result.examples_per_second
                    cells += [_time(result.seconds), f"{speed:,.{0 if speed >= 100 else 1}f}"]
                    cells.append(f"{result.efficiency:.0%}")
                lines.append([*cells, size_text(result.memory)])
        table = indent(columns(lines, "><>>>>>>>"), "  ")
        notes = (
            f"{rows} each, {rows} in all: a step of {rows} examples for each worker or in all."
            " bfloat16: with gradient_dtype. sharded: with shard_optimizer=True. memory: variables,"
            " slots and gradients of a worker, without activations."
        )
        return "\n\n".join([self._title(), table, fill(notes, 100), fill(self.advice, 100)])

    def _title(self) -> str:
        step, network = self.step, self.network
        rows = f" and {step.table_ids} rows of tables" if step.table_ids else ""
        return (
            f"{counted(step.rows, 'example')} in {_time(step.seconds)} on one device,"
            f" {size_text(step.dense_bytes)} of gradients{rows},"
            f" {rate_text(network.bandwidth)}, latency {_time(network.latency)}"
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
            text += ' times as fast with gradient_dtype="bfloat16"'
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

        axes = Figure(figsize=(8, 4.5)).add_subplot()
        axes.set_title(self._title(), fontsize=10, loc="left")
        ideal = [count * self.step.rows / self.step.seconds for count in self.workers]
        axes.plot(self.workers, ideal, ":", color="grey", label="ideal")
        for same_batch, narrow in itertools.product(_BOTH, repeat=2):
            setting = {"same_batch": same_batch, "narrow": narrow}
            speeds = [self.estimate(n, **setting).examples_per_second for n in self.workers]
            name = "same global batch" if same_batch else "same batch for each worker"
            style = f"C{int(same_batch)}{'--' if narrow else '-'}o"
            axes.plot(self.workers, speeds, style, label=name + ", bfloat16" * narrow)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xticks(self.workers, labels=list(map(str, self.workers)))
        axes.yaxis.set_major_formatter("{x:,.4g}")
        axes.set(xlabel="workers", ylabel="examples per second")
        axes.legend(frameon=False, fontsize=8)
        return axes.figure


def _padded(size: int, itemsize: int) -> int:
    """The bytes of a vector, padded as in strategies/reductions.py: to 4 lengths per octave."""
    length = -(-size // itemsize)
    step = 1 << max(0, (length - 1).bit_length() - 3)
    return -(-length // step) * step * itemsize


def parse_rate(text: str, what: str = "network") -> float:
    """Returns bytes per second of a text such as "10Gbit", "100 Mbit/s" or "1.25GB/s".

    Raises:
        PlacementError: the text has another form, or is 0.
    """
    match = _RATE.fullmatch(text) if isinstance(text, str) else None
    number = Decimal(match[1]) if match else Decimal(0)
    if match is None or not number:
        raise PlacementError(
            f'{what} must be a rate with a unit, such as "10Gbit", "100Mbit/s" or "1.25GB/s", got'
            f" {shown(text)}."
        )
    rate = number * 1000 ** " kmgt".index(match[2].lower() or " ")
    return float(rate / 8 if match[3] else rate)


def rate_text(rate: float) -> str:
    """Returns a rate in bits, such as "10 Gbit/s"."""
    bits = rate * 8
    power = min(max(int(math.log10(bits) // 3), 0), 4)
    return f"{bits / 1000**power:.3g} {['', 'k', 'M', 'G', 'T'][power]}bit/s"


def parse_seconds(value: float | str, what: str) -> float:
    """Returns seconds from a number of seconds, or a text such as "0.35s", "350ms" or "50us".

    Raises:
        PlacementError: the text has another form, or the number is negative or not finite.
    """
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf:
        return float(value)
    match = _SECONDS.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise PlacementError(
            f'{what} must be a time of at least 0, such as "0.35s" or "350ms", got {shown(value)}.'
        )
    return float(Decimal(match[1]).scaleb(_UNITS_OF_SECONDS[match[2]]))


def _time(seconds: float) -> str:
    """A readable time, such as "1.35 s", "350 ms" or "50 us"."""
    power = 0 if seconds >= 1 else 1 if seconds >= 1e-3 else 2
    return f"{seconds * 1000**power:.3g} {('s', 'ms', 'us')[power]}"
