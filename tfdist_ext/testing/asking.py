"""Asking a strategy, in each of the ways there are, and comparing what each replica has."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

__all__ = [
    "WAYS",
    "Wide",
    "expect",
    "expect_close",
    "numbers",
    "quiet",
    "replica",
    "run",
    "sums_of_wide",
    "wide",
]

WAYS = ("eager", "tf.function around", "tf.function within")


def run(strategy: tf.distribute.Strategy, step: Callable[..., Any], way: str, *args: Any) -> Any:
    """strategy.run in one of the WAYS: eager, within a tf.function, or around one."""
    if way == "eager":
        return strategy.run(step, args=args)
    if way == "tf.function around":
        return tf.function(lambda: strategy.run(step, args=args))()
    return strategy.run(tf.function(step), args=args)


def numbers(strategy: tf.distribute.Strategy, value: Any) -> list[Any]:
    """What each replica, or each copy of a variable, has: numbers of Python, or lists of them."""
    return [
        part.numpy().tolist() if hasattr(part, "numpy") else part
        for part in strategy.experimental_local_results(value)
    ]


def replica() -> tf.Tensor:
    """1.0 on the first replica, 2.0 on the second, and so on."""
    context = tf.distribute.get_replica_context()
    return tf.cast(context.replica_id_in_sync_group, tf.float32) + 1


class Wide(NamedTuple):
    """What a reduction might cut short: 64 bits, which float32 does not hold, and many axes."""

    int64: Any
    float64: Any
    rank_3: Any
    rank_4: Any


def wide() -> Wide:
    """Of this replica."""
    own = replica()
    return Wide(
        int64=tf.cast(own, tf.int64) + 2**24,
        float64=tf.cast(own, tf.float64) + 2.0**-40,
        rank_3=tf.fill([2, 1, 3], own),
        rank_4=tf.fill([1, 2, 1, 2], own),
    )


def sums_of_wide(count: int) -> Wide:
    """Of `wide()` over this many replicas: numbers of Python, and lists of them."""
    total = count * (count + 1) // 2
    return Wide(
        int64=total + count * 2**24,
        float64=total + count * 2.0**-40,
        rank_3=[[[float(total)] * 3]] * 2,
        rank_4=[[[[float(total)] * 2]] * 2],
    )


def expect(what: str, got: Any, wanted: Any) -> None:
    """Raise AssertionError, which says what was asked, unless `got` equals `wanted`."""
    __tracebackhide__ = True
    if got != wanted:
        raise AssertionError(f"{what}: {wanted!r} is right; {got!r} arrived.")


def expect_close(what: str, got: Any, wanted: Any, tolerance: float) -> None:
    """Raise AssertionError unless no number is further off than `tolerance`.

    It counts relative to the largest of the wanted numbers where that is above 1.
    """
    __tracebackhide__ = True
    ours, right = np.asarray(got), np.asarray(wanted)
    if ours.shape != right.shape:
        raise AssertionError(f"{what}: shape {right.shape} is right; {ours.shape} arrived.")
    off = np.abs(ours - right).max(initial=0) / max(1, np.abs(right).max(initial=0))
    if not off <= tolerance:  # not a number is too far off, too
        raise AssertionError(f"{what}: off by {off:.1e}, and {tolerance:.0e} is allowed.")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Scope in which TensorFlow and Keras may warn of what the caller has not done."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        # Said of each distributed dataset that a tf.function goes through.
        warnings.filterwarnings("ignore", message="To make it possible to preserve tf.data options")
        yield
