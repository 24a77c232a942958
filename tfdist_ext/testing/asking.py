"""Asking a strategy, in each of the ways there are, and comparing what each replica has."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

__all__ = ["WAYS", "expect", "expect_close", "numbers", "quiet", "replica", "run"]

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
