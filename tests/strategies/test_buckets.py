"""Gradients in buckets: each element is in one bucket, and comes back to its place."""

from __future__ import annotations

import itertools

import numpy as np
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdist_ext.strategies.buckets import buckets_of, dense_bytes, reduced_in_buckets
from tfdist_ext.strategies.owned_sums import owned_buckets


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


@given(st.data(), st.integers(1, 5), st.integers(1, 300))
def test_every_element_goes_to_its_owner(data: st.DataObject, workers: int, largest: int) -> None:
    """And no worker gets much more of a bucket than the others, as long as they own as much."""
    pieces = st.lists(st.tuples(st.integers(0, workers - 1), st.integers(0, 90)), max_size=4)
    owners = [
        [(worker, end - size, end) for (worker, size), end in zip(value, ends, strict=True)]
        for value in data.draw(st.lists(pieces, max_size=6))
        for ends in [list(itertools.accumulate(size for _, size in value))]
    ]
    buckets = owned_buckets(owners, workers, largest)
    owner_of: dict[int, dict[int, int]] = {value: {} for value in range(len(owners))}
    lengths = []
    for bucket in buckets:
        lengths.append(max(sum(p.stop - p.start for p in part) for part in bucket))
        for worker, part in enumerate(bucket):
            for piece in part:
                owner_of[piece.value] |= dict.fromkeys(range(piece.start, piece.stop), worker)
    for value, parts in enumerate(owners):
        assert owner_of[value] == {i: w for w, start, stop in parts for i in range(start, stop)}
    assert all(0 < length <= -(-largest // workers) + 2 * 16 for length in lengths)


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
