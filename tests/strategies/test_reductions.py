"""Values of varying size that workers sum: sizes, keys and padding."""

from __future__ import annotations

import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdist_ext.strategies.reductions import SIZES, key_of_size, padded_to_size


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
