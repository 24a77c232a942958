"""Custom loops, `for batch in data`: over replicas, with padding; and their position."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfdist_ext as tfd
from tfdist_ext.data import (
    DataError,
    Remainder,
    Shard,
    from_arrays,
    shard_range,
)

ROWS = 23
X = np.arange(1, ROWS + 1, dtype="float32")


def ordered(**settings: Any) -> Any:
    return from_arrays((X, X * 2), **{"global_batch_size": 10, "seed": 1, **settings})


def mirrored(replicas: int) -> tf.distribute.Strategy:
    return tfd.create_strategy("mirrored", devices=[f"CPU:{i}" for i in range(replicas)])


def test_a_loop_advances_the_position() -> None:
    data = ordered()
    seen = []
    for step, (x, _) in enumerate(data):
        seen += x.numpy().tolist()
        assert data.position == ((0, 10 * (step + 1)) if step < 2 else (1, 0))
    assert sorted(seen) == X.tolist()
    for _ in data.batches():
        break
    assert data.position == (1, 10)
    assert len(list(data)) == 2  # the rest of that epoch
    assert data.position == (2, 0)


def test_padded_batches_of_two_replicas_go_on_with_four() -> None:
    """Training loops: tests/examples/test_example_custom_loops.py."""
    rows: list[float] = []

    def read(data: Any, replicas: int, most: int) -> None:
        strategy = mirrored(replicas)
        batches = data.batches(strategy, remainder=Remainder.PAD)
        for batch in itertools.islice(batches, most):
            x, _, weights = (strategy.experimental_local_results(part) for part in batch)
            assert {len(part) for part in x} == {-(-10 // replicas)}
            for part, weight in zip(x, weights, strict=True):
                rows.extend(part.numpy()[weight.numpy() == 1].tolist())

    data, again = ordered(), ordered()
    read(data, 2, most=1)
    again.restore(data.state())
    read(again, 4, most=9)
    assert sorted(rows) == X.tolist()


@pytest.mark.parametrize("count", [1, 4])
def test_padded_parts_have_one_size_and_dropped_ones_too(count: int) -> None:
    data = ordered()
    width = -(-10 // count)
    seen: list[float] = []
    for index in range(count):
        spec = data.dataset(Shard(index, count), remainder=Remainder.PAD).element_spec
        assert [part.shape.as_list() for part in spec] == [[width]] * 3
        for x, y, weight in data.dataset(Shard(index, count), 0, remainder=Remainder.PAD):
            np.testing.assert_array_equal(y, 2 * x)
            assert set(weight.numpy()) <= {0.0, 1.0}
            seen += x.numpy()[weight.numpy() == 1].tolist()
    assert sorted(seen) == X.tolist()
    for step, size in enumerate((10, 10, 3)):
        if size < count:  # nobody has a part of it
            assert len(list(data.dataset(Shard(0, count), 0, remainder=Remainder.DROP))) == step
            break
        parts = [
            list(data.dataset(Shard(i, count), 0, remainder=Remainder.DROP))[step][0].shape[0]
            for i in range(count)
        ]
        ranges = [shard_range(size, Shard(i, count), Remainder.DROP).size for i in range(count)]
        assert parts == ranges


def test_wrong_remainders_are_refused() -> None:
    with pytest.raises(DataError, match=r"must be \(x, y\) or"):
        from_arrays(X, global_batch_size=10).dataset(remainder=Remainder.PAD)
    with pytest.raises(DataError, match=r"Remainder\.KEEP, Remainder\.DROP or"):
        ordered().dataset(remainder="pad")


def test_the_shard_of_an_input_context_and_of_a_strategy() -> None:
    context = tf.distribute.InputContext(num_input_pipelines=3, input_pipeline_id=2)
    data = ordered()
    for batch, wanted in zip(data.dataset(context), data.dataset(Shard(2, 3)), strict=True):
        np.testing.assert_array_equal(batch[0], wanted[0])
    assert len(list(data.dataset(mirrored(2)))) == 3
