"""from_dataset_fn: a function decides what each shard reads; positions in it."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfdist_ext as tfd
from tfdist_ext.data import DataError, Remainder, Shard, ShardedDataset, from_dataset_fn


def of_shard(shard: Shard) -> tf.data.Dataset:
    return tf.data.Dataset.range(20).shard(shard.count, shard.index)


def rows(dataset: Any) -> list[list[int]]:
    return [batch.numpy().tolist() for batch in dataset]


def test_the_parts_of_a_step_are_its_global_batch() -> None:
    data = from_dataset_fn(of_shard, global_batch_size=7)
    assert isinstance(data, ShardedDataset)
    parts = [rows(data.dataset(Shard(i, 3))) for i in range(3)]
    assert [[len(batch) for batch in part] for part in parts] == [
        [2, 2, 2, 1],  # 7 examples are 2, 2 and 3 of each step
        [2, 2, 2, 1],
        [3, 3],
    ]
    assert sorted(np.concatenate([row for part in parts for row in part])) == list(range(20))
    assert rows(data.dataset()) == [[*range(7)], [*range(7, 14)], [*range(14, 20)]]
    assert (data.steps, len(data), data.global_batch_size) == (3, 3, 7)


def test_the_epoch_goes_to_functions_that_take_it() -> None:
    def of_epoch(shard: Shard, epoch: int) -> tf.data.Dataset:
        order = np.random.default_rng(epoch).permutation(20)[shard.index :: shard.count]
        return tf.data.Dataset.from_tensor_slices(order).batch(5)

    data = from_dataset_fn(of_epoch)
    orders = [rows(data.dataset(epoch=epoch)) for epoch in (0, 1, 0)]
    assert orders[0] == orders[2] != orders[1]
    data.end_epoch()
    assert rows(data.dataset()) == orders[1]


def test_a_state_does_not_call_the_function_again() -> None:
    calls = []

    def of_epoch(shard: Shard, epoch: int) -> tf.data.Dataset:
        calls.append(epoch)
        return tf.data.Dataset.range(20).batch(4)

    data = from_dataset_fn(of_epoch)
    states = [data.state() for _ in range(3)]
    assert states[0] == states[1] == states[2]
    assert calls == [0]


def test_a_state_resumes_inside_an_epoch() -> None:
    def of_epoch(shard: Shard, epoch: int) -> tf.data.Dataset:
        return of_shard(shard)

    data = from_dataset_fn(of_epoch, global_batch_size=4)
    assert len(rows(data.dataset(Shard(0, 2)))) == 5
    data.shards = 2
    data.advance(3)
    state = json.loads(json.dumps(data.state()))
    assert (state["epoch"], state["steps"], state["shards"]) == (0, 3, 2)
    again = from_dataset_fn(of_epoch, global_batch_size=4)
    again.restore(state)
    assert rows(again.dataset(Shard(1, 2))) == [[13, 15], [17, 19]]
    assert rows(again.dataset(Shard(1, 2), epoch=1))[0] == [1, 3]
    with pytest.raises(DataError, match="batches of each of 2 shards, so 3 shards cannot resume"):
        again.dataset(Shard(0, 3))
    again.end_epoch()
    assert again.position == (1, 0)
    assert len(rows(again.dataset(Shard(0, 4)))) == 5  # any number at the start of an epoch


def test_looking_at_another_shard_does_not_change_the_state() -> None:
    data = from_dataset_fn(of_shard, global_batch_size=4)
    for _ in data.batches():
        data.dataset(Shard(0, 4))
        assert data.state()["shards"] == 1
    assert data.position == (1, 0)


def test_without_an_epoch_a_broken_off_one_begins_again() -> None:
    """A shuffle in it may come otherwise: what is behind would not be what was."""
    data = from_dataset_fn(lambda shard: of_shard(shard).shuffle(20).batch(2))
    data.advance(3)
    assert data.position == (0, 0)
    assert not data.resumes_inside_epochs


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": -1}, "position's steps must be an integer"),
        ({"shards": 0}, "position's shards must be an integer"),
        ({"fingerprint": {"kind": "files"}}, "data has changed .*: kind files -> dataset function"),
        ({"place": 1}, "state must have the fields epoch, steps"),
    ],
)
def test_other_states_are_refused(change: dict[str, Any], message: str) -> None:
    data = from_dataset_fn(of_shard, global_batch_size=4)
    with pytest.raises(DataError, match=message):
        data.restore({**data.state(), **change})


def test_other_things_than_batches_of_a_dataset_are_refused() -> None:
    with pytest.raises(DataError, match=r"function must take \(shard\)"):
        from_dataset_fn(lambda: None)
    with pytest.raises(
        DataError, match=r"the function returned \[1, 2\] for shard 0 of 1, not a tf\.data"
    ):
        from_dataset_fn(lambda shard: [1, 2]).dataset()
    with pytest.raises(DataError, match=r"has single examples.*or give global_batch_size"):
        from_dataset_fn(of_shard).dataset()
    for index in range(3):  # on all tasks, also those with an example
        with pytest.raises(DataError, match="=2 is less than the number of shards, 3"):
            from_dataset_fn(of_shard, global_batch_size=2).dataset(Shard(index, 3))
    with pytest.raises(DataError, match="global_batch_size must be an integer of at least 1"):
        from_dataset_fn(of_shard, global_batch_size=0)


def test_a_loop_over_replicas_cuts_the_batches(four_cpus: None) -> None:
    data = from_dataset_fn(of_shard, global_batch_size=7)
    strategy = tfd.create_strategy("mirrored", devices=3)
    batches = [
        [part.numpy().tolist() for part in strategy.experimental_local_results(batch)]
        for batch in data.batches(strategy)
    ]
    assert [len(parts) for parts in batches] == [3, 3, 3]
    assert np.concatenate([part for parts in batches for part in parts]).tolist() == [*range(20)]
    assert data.position == (1, 0)
    with pytest.raises(
        DataError,
        match=r"must be Remainder\.KEEP for data made .*, got Remainder\.PAD",
    ):
        next(iter(data.batches(strategy, remainder=Remainder.PAD)))
