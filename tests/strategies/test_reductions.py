"""Values of varying size that workers sum or gather: sizes, keys, padding, slices in a vector."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdist_ext.strategies.reductions import (
    SIZES,
    from_vectors,
    in_one_vector,
    key_of_size,
    padded_to_size,
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


INDICES = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=3)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@settings(deadline=None, max_examples=20)
@given(st.lists(st.tuples(INDICES, st.sampled_from([(), (3,), (2, 2)])), min_size=1, max_size=3))
def test_slices_travel_in_one_vector(dtype: str, tables: list[tuple[list[int], Any]]) -> None:
    """To the bit: an index may look like any number, a NaN or one that is flushed to zero."""

    def of_replica(number: int) -> list[tf.IndexedSlices]:
        found = []
        for place, (indices, inner) in enumerate(tables):
            kind = tf.int32 if place % 2 else tf.int64
            values = tf.cast(tf.random.stateless_normal([len(indices), *inner], [number, 0]), dtype)
            mine = tf.constant([index ^ number for index in indices], kind)
            found.append(tf.IndexedSlices(values, mine, [9, *inner]))
        return found

    parts = [of_replica(number) for number in range(3)]
    vectors = [padded_to_size(in_one_vector(part)) for part in parts]
    for found, *of_table in zip(
        from_vectors(tf.concat(vectors, 0), 3, parts[1]), *parts, strict=True
    ):
        assert found.indices.dtype == of_table[0].indices.dtype
        for name in ("values", "indices"):
            wanted = tf.concat([getattr(slices, name) for slices in of_table], 0)
            np.testing.assert_array_equal(getattr(found, name), wanted)
