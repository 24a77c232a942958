"""What checks share: steps to run, values that tell replicas apart, and comparisons."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

__all__ = [
    "RUN_MODES",
    "ReductionProbe",
    "expect_close",
    "expect_equal",
    "ignore_known_warnings",
    "local_values",
    "probe_sums",
    "reduction_probe",
    "replica_number",
    "run",
]

RUN_MODES = ("eager", "tf.function around", "tf.function within")


def run(strategy: tf.distribute.Strategy, step: Callable[..., Any], mode: str, *args: Any) -> Any:
    """Call `strategy.run` in one of the RUN_MODES: eagerly, in a tf.function, or of one."""
    if mode == "eager":
        return strategy.run(step, args=args)
    if mode == "tf.function around":
        return tf.function(lambda: strategy.run(step, args=args))()
    return strategy.run(tf.function(step), args=args)


def local_values(strategy: tf.distribute.Strategy, value: Any) -> list[Any]:
    """The value of each replica, or of each copy of a variable, as Python numbers or lists."""
    return [
        part.numpy().tolist() if hasattr(part, "numpy") else part
        for part in strategy.experimental_local_results(value)
    ]


def replica_number() -> tf.Tensor:
    """1.0 on the first replica, 2.0 on the second, and so on."""
    context = tf.distribute.get_replica_context()
    return tf.cast(context.replica_id_in_sync_group, tf.float32) + 1


class ReductionProbe(NamedTuple):
    """Values that a faulty reduction changes: 64 bits, which float32 cannot hold, and many axes."""

    int64: Any
    float64: Any
    rank_3: Any
    rank_4: Any


def reduction_probe() -> ReductionProbe:
    """The values of this replica."""
    own = replica_number()
    return ReductionProbe(
        int64=tf.cast(own, tf.int64) + 2**24,
        float64=tf.cast(own, tf.float64) + 2.0**-40,
        rank_3=tf.fill([2, 1, 3], own),
        rank_4=tf.fill([1, 2, 1, 2], own),
    )


def probe_sums(count: int) -> ReductionProbe:
    """The sums of `reduction_probe()` over this many replicas, as Python numbers and lists."""
    total = count * (count + 1) // 2
    return ReductionProbe(
        int64=total + count * 2**24,
        float64=total + count * 2.0**-40,
        rank_3=[[[float(total)] * 3]] * 2,
        rank_4=[[[[float(total)] * 2]] * 2],
    )


def expect_equal(what: str, got: Any, wanted: Any) -> None:
    """Raise AssertionError, which names `what`, unless `got` equals `wanted`."""
    __tracebackhide__ = True
    if got != wanted:
        raise AssertionError(f"{what}: must be {wanted!r}, got {got!r}.")


def expect_close(what: str, got: Any, wanted: Any, tolerance: float) -> None:
    """Raise AssertionError if any number differs by more than `tolerance`.

    The difference is relative to the largest of the wanted numbers if that is above 1.
    """
    __tracebackhide__ = True
    ours, right = np.asarray(got), np.asarray(wanted)
    if ours.shape != right.shape:
        raise AssertionError(f"{what}: the shape must be {right.shape}, got {ours.shape}.")
    off = np.abs(ours - right).max(initial=0) / max(1, np.abs(right).max(initial=0))
    if not off <= tolerance:  # also raises for NaN
        raise AssertionError(f"{what}: difference must be at most {tolerance:.0e}, got {off:.1e}.")


@contextlib.contextmanager
def ignore_known_warnings() -> Iterator[None]:
    """Scope that ignores warnings about how TensorFlow and Keras call each other."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        # TensorFlow warns about each distributed dataset that a tf.function iterates over.
        warnings.filterwarnings("ignore", message="To make it possible to preserve tf.data options")
        yield
