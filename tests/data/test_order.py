"""The order of examples: a good permutation, the same for any number of shards."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdist_ext.data import DataError
from tfdist_ext.data.order import Order
from tfdist_ext.data.shards import bounds


def examples(order: Order, step: int | tf.Tensor, epoch: int = 0) -> np.ndarray:
    """The examples of a step's global batch."""
    return order.rows(step, 0, order.size(step), order.key(epoch)).numpy()


def epoch_of(order: Order, count: int = 1, epoch: int = 0) -> np.ndarray:
    """All examples of an epoch as `count` shards read them, put together step by step."""
    parts = [
        order.rows(step, *bounds(order.size(step), i, count), order.key(epoch)).numpy()
        for step in range(order.steps)
        for i in range(count)
    ]
    return np.concatenate(parts)


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 3000), st.integers(1, 500), st.integers(0, 2**63 - 1), st.integers(0, 99))
def test_an_epoch_has_every_example_once(n: int, batch: int, seed: int, epoch: int) -> None:
    batch = max(min(batch, n), n // 8 + 1)  # few steps: each is a call of TensorFlow
    order = Order(n, batch, seed)
    assert order.steps == (n + batch - 1) // batch
    np.testing.assert_array_equal(np.sort(epoch_of(order, epoch=epoch)), np.arange(n))


@pytest.mark.parametrize("n", [1024, 1025, 2**16 + 1])
def test_an_epoch_has_every_example_once_around_powers_of_two(n: int) -> None:
    found = examples(Order(n, n, seed=3), 0)
    np.testing.assert_array_equal(np.sort(found), np.arange(n))


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("count", [3, 16])
def test_the_order_does_not_depend_on_the_number_of_workers(seed: int | None, count: int) -> None:
    order = Order(103, 10, seed)  # 10 does not divide by 3 and 16; the last batch has 3
    np.testing.assert_array_equal(epoch_of(order, count, 2), epoch_of(order, 1, 2))


def test_the_order_is_written_down() -> None:
    """Positions in old checkpoints mean these orders; they must not change."""
    order = Order(8, 3, seed=42)
    np.testing.assert_array_equal(epoch_of(order), [0, 4, 3, 6, 7, 5, 1, 2])
    np.testing.assert_array_equal(epoch_of(order, epoch=1), [6, 5, 2, 1, 0, 7, 3, 4])
    order = Order(2000, 8, seed=42)
    np.testing.assert_array_equal(examples(order, 0), [476, 175, 600, 1770, 962, 238, 821, 1468])
    found = examples(order, 3, epoch=5)
    np.testing.assert_array_equal(found, [1027, 886, 1705, 1902, 925, 1387, 118, 1342])


def test_the_rest_of_an_epoch_after_a_stop() -> None:
    order = Order(103, 10, seed=9)
    whole = epoch_of(order, epoch=3)
    rest = order.after(30)
    assert rest.steps == 8
    np.testing.assert_array_equal(epoch_of(rest, 3, epoch=3), whole[30:])
    # Also when the batch is another one from there on.
    np.testing.assert_array_equal(
        epoch_of(Order(103, 7, 9, examples_seen=30), 2, epoch=3), whole[30:]
    )
    assert order.after(103).steps == 0


def sigmas(a: np.ndarray, b: np.ndarray) -> float:
    """The correlation of two samples, in standard deviations of that of random ones."""
    return abs(np.corrcoef(a, b)[0, 1]) * np.sqrt(len(a))


@pytest.mark.parametrize("n", [1000, 10**6, 10**12])
def test_the_order_looks_random(n: int) -> None:
    """With TensorFlow's own 4 rounds, these are 20 to 300 standard deviations."""
    sample = min(n, 100_000)
    orders = [examples(Order(n, sample, seed=7), 0, epoch) for epoch in range(4)]
    position = np.arange(sample)
    for order in orders:
        assert max(sigmas(order[:-lag], order[lag:]) for lag in (1, 2, 3, 8, 16, 64, 256)) < 5
        assert sigmas(order, position) < 5
        assert (order == position).sum() < 10  # one on average, for a whole permutation
    for one, other in [(0, 1), (1, 2), (0, 2), (0, 3)]:
        assert sigmas(orders[one], orders[other]) < 5
    assert len(set(map(bytes, orders))) == 4
    if n > sample:  # an even part of every region of the data
        counts = np.histogram(orders[0], 100, (0, n))[0]
        assert ((counts - 1000) ** 2 / 1000).sum() < 180  # 99 on average; over 180: 1 in a million


@pytest.mark.parametrize("number", [-1, 1.5, True, 2**63])
def test_seeds_and_epochs_are_whole_numbers(number: Any) -> None:
    with pytest.raises(DataError, match="seed must be an integer from 0"):
        Order(10, 2, number)
    with pytest.raises(DataError, match="epoch must be an integer from 0"):
        Order(10, 2, 1).key(number)


def test_orders_that_cannot_be() -> None:
    with pytest.raises(DataError, match=r"number of examples .*got 0"):
        Order(0, 1)
    with pytest.raises(DataError, match=r"size must be at most 10, .* got 11"):
        Order(10, 11)
