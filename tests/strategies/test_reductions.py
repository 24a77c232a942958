"""Values of varying sizes: keys and padding. Buckets: each element comes back to its place."""

from __future__ import annotations

import itertools

import numpy as np
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdist_ext.strategies.reductions import (
    SIZES,
    buckets_of,
    dense_bytes,
    key_of_size,
    padded_to_size,
    reduced_in_buckets,
)


@settings(deadline=None)
@given(st.integers(0, 10_000))
def test_at_most_a_quarter_more(size: int) -> None:
    padded = padded_to_size(tf.ones([size]))
    assert size <= len(padded) <= max(1, 1.25 * size)
    assert len(padded_to_size(padded)) == len(padded)
    assert len(padded) in SIZES
    assert float(tf.reduce_sum(padded)) == size


KEYS = st.tuples(st.integers(1, 2**24 - 1), st.sampled_from(SIZES))


@settings(deadline=None)
@given(KEYS, KEYS)
def test_each_key_and_size_have_a_key(one: tuple[int, int], other: tuple[int, int]) -> None:
    first, second = (int(key_of_size(key, tf.constant(size))) for key, size in (one, other))
    assert (first == second) == (one == other)
    assert -(2**31) <= first < 0  # TensorFlow's own are above


def test_large_values_are_cut_and_small_ones_packed() -> None:
    # The last value comes first, and 100 elements are two buckets.
    assert buckets_of([10, 100, 20, 30], 64) == [
        [(1, 0, 64)],
        [(1, 64, 100)],
        [(3, 0, 30), (2, 0, 20), (0, 0, 10)],
    ]
    assert buckets_of([30, 20, 40], 64) == [[(2, 0, 40), (1, 0, 20)], [(0, 0, 30)]]
    assert buckets_of([], 64) == []


@given(st.lists(st.integers(0, 500)), st.integers(1, 200))
def test_every_element_is_in_one_bucket(sizes: list[int], largest: int) -> None:
    buckets = buckets_of(sizes, largest)
    seen: dict[int, list[int]] = {value: [] for value in range(len(sizes))}
    for bucket in buckets:
        assert sum(piece.stop - piece.start for piece in bucket) <= largest
        for piece in bucket:
            seen[piece.value] += range(piece.start, piece.stop)
    assert {value: list(range(size)) for value, size in enumerate(sizes)} == seen
    # No two neighbors would fit into one, unless one of them is a part of a value.
    whole = [b for b in buckets if all(p.start == 0 and p.stop == sizes[p.value] for p in b)]
    for one, two in itertools.pairwise(whole):
        assert sum(p.stop for p in one) + two[0].stop > largest


@settings(deadline=None, max_examples=20)
@given(st.lists(st.sampled_from([(), (0,), (3,), (40, 2), (17, 5)])), st.integers(4, 400))
def test_values_come_back_to_their_places(shapes: list[tuple[int, ...]], size: int) -> None:
    dtypes = [tf.float32, tf.float64]
    random = np.random.default_rng(0)
    values = [
        tf.constant(random.normal(size=shape), dtypes[number % 2])
        for number, shape in enumerate(shapes)
    ]
    slices = tf.IndexedSlices(tf.ones([2, 3]), tf.constant([5, 1]))
    counted = []

    def doubled(parts: list) -> list:
        counted.extend(parts)
        return [tf.IndexedSlices(v.values * 2, v.indices) if v is slices else v * 2 for v in parts]

    *results, of_slices = reduced_in_buckets([*values, slices], size, doubled)
    for value, result in zip(values, results, strict=True):
        np.testing.assert_array_equal(result, value * 2)
    np.testing.assert_array_equal(of_slices.values, 2 * np.ones([2, 3]))
    assert sum(map(tf.size, map(tf.convert_to_tensor, counted[:-1]))) == sum(map(tf.size, values))
    assert dense_bytes([*values, slices]) == sum(v.dtype.size * tf.size(v) for v in values)
