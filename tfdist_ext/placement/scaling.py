"""How fast a training would be on several workers, computed from one step and the network.

The functions are arithmetic without TensorFlow. Workers compute a step, and sum its gradients in
buckets. In a ring all-reduce each worker sends 2 (N-1)/N of the bytes, in 2 (N-1) messages. The sum
of a bucket starts when the gradients are ready and the bucket before it is summed.

Source: Patarasuk and Yuan 2009, https://doi.org/10.1016/j.jpdc.2008.09.002.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from decimal import Decimal

from tfdist_ext.errors import PlacementError
from tfdist_ext.messages import shown

_BUCKET_BYTES_PER_WORKER = 4 << 20  # as in strategies/reductions.py
_NARROW_ITEMSIZE = 2  # bytes of a bfloat16 and of a float16
_ID_DIGITS, _NARROW_ID_BYTES = 3, 8  # an id travels as three numbers, or as its own 8 bytes
_NUMBER = r"\s*([0-9]{1,15}(?:\.[0-9]{1,9})?)\s*"
_RATE = re.compile(_NUMBER + r"([kKmMgGtT]?)(?:([bB]it|b)(?:/s|ps)?|B/s)\s*")
_SECONDS = re.compile(_NUMBER + r"(s|ms|us)\s*")
_UNITS_OF_SECONDS = {"s": 0, "ms": -3, "us": -6}


@dataclass(frozen=True, kw_only=True)
class Network:
    """A network between workers, and how a step uses it.

    Attributes:
        bandwidth: the bytes per second that a worker can send.
        latency: the seconds until a message arrives.
        usable: the fraction of the bandwidth that gradients get.
        host: the bytes per second that a worker's processor moves, in addition to the network.
        overhead: the seconds of a collective besides its messages.
        bucket_bytes: the size of a bucket of gradients. 0 sums all gradients at once, except with
            `shard_optimizer`. None is 4 MiB times the number of workers, the default on CPUs.
        overlap: the last fraction of a step's computation, during which gradients become ready.
        straggling: the standard deviation of the computation's time between workers, relative to
            its mean. All workers wait for the slowest worker.
    """

    bandwidth: float
    latency: float = 1e-4
    usable: float = 0.9
    host: float = math.inf
    overhead: float = 5e-4
    bucket_bytes: int | None = None
    overlap: float = 0.6
    straggling: float = 0.0

    def buckets(self, size: int, workers: int, *, sharded: bool) -> int:
        """Returns the number of buckets of this many bytes of gradients or weights."""
        if self.bucket_bytes == 0 and not sharded:
            return 1
        return max(1, -(-size // (self.bucket_bytes or _BUCKET_BYTES_PER_WORKER * workers)))

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
        if narrow:
            return _padded(values * _NARROW_ITEMSIZE + ids * _NARROW_ID_BYTES, 4)
        return _padded((values + ids * _ID_DIGITS) * self.itemsize, self.itemsize)

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
        count = network.buckets(step.dense_bytes, workers, sharded=sharded)
        ratio = min(1.0, _NARROW_ITEMSIZE / step.itemsize) if narrow else 1.0
        sent = part * step.dense_bytes * ratio / count
        reducing = network.seconds(sent, 1)  # an all-to-all, and each worker adds
        if not sharded:
            gathering = network.seconds(sent, workers - 1)
            ring = network.seconds(2 * sent, 2 * (workers - 1))
            reducing = reducing + gathering if narrow else ring
        first = seconds * (1 - network.overlap * (1 - 1 / count))
        # Either the network works without a pause, or it waits for the last bucket.
        seconds = max(first + count * reducing, seconds + reducing)
    if step.table_ids:
        size = step.gathered_bytes(rows, workers, narrow=narrow)
        seconds += network.seconds(2 * part * size, 4 * (workers - 1), 2)  # counts, then rows
    if sharded:
        count = network.buckets(step.trained_bytes, workers, sharded=True)
        seconds += network.seconds(part * step.trained_bytes, count * (workers - 1), count)
    return seconds


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
