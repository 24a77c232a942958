"""Which answers of workers count, and who reads the shard of an absent worker."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tfdist_ext.training.parameter_server.worker_data import Answer, WorkerIterators


class Table:
    """What the workers see: the shard of each worker, and the position in each shard."""

    def assign(self, values: Any) -> None:
        self.values = np.array(values).tolist()


def pass_of(workers: int) -> tuple[WorkerIterators, Any]:
    batches: Any = SimpleNamespace(workers=workers, iterators=lambda table: "iterators")
    data, table = WorkerIterators(batches), Table()
    data.begin(table)  # type: ignore[arg-type]
    return data, table


def answer(shard: int, end: int, steps: int, is_done: bool = False) -> Answer:
    return Answer(np.int64(shard), np.int64(end), np.int64(steps), np.bool_(is_done), None)


def test_an_answer_counts_if_it_follows_those_that_are_counted() -> None:
    data, table = pass_of(2)
    first, second, other = answer(0, 8, 8), answer(0, 16, 8), answer(1, 3, 3)
    assert data.count([second, first, other]) == [first, other, second]
    assert data.of_workers == "iterators"
    for repeated_or_early in (answer(0, 16, 8), answer(0, 32, 8), answer(0, 24, 0, True)):
        assert data.count([repeated_or_early]) == []
        assert data.of_workers is None
        data.begin(table)
        assert table.values == [[0, 1], [16, 3]]
    last = answer(0, 20, 4, True)
    assert data.count([answer(0, 20, 0, True), last]) == [last]
    assert data.unfinished == {1}


def test_a_worker_that_is_done_takes_over_a_shard() -> None:
    data, table = pass_of(3)
    data.count([answer(0, 5, 5), answer(2, 7, 7, True)])
    data.hand_over([answer(0, 5, 0)], 10.0)  # no worker is done
    assert data.of_workers == "iterators"
    with pytest.warns(UserWarning, match="worker 0 has not answered for 10 s.* worker 2 goes on"):
        data.hand_over([answer(2, 7, 0, True)], 10.0)
    data.begin(table)
    assert table.values == [[2, 1, 0], [5, 0, 7]]
