"""Buckets of values that have owners: each element goes to its owner, and to no other worker."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from tfdist_ext.strategies.owned_sums import owned_buckets


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
