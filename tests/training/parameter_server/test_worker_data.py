"""Which answers of workers count, and what happens without a worker or a server."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfdist_ext as tfd
from tfdist_ext.data.worker_batches import Answer, WorkerIterators
from tfdist_ext.training.agreement.task_status import TaskStatus
from tfdist_ext.training.parameter_server.calls import CoordinatorReduction, shorten_error


def pass_of(workers: int) -> WorkerIterators:
    batches: Any = SimpleNamespace(workers=workers, on_workers=[])
    return WorkerIterators(batches)


def answer(shard: int, end: int, steps: int, is_done: bool = False) -> Answer:
    return Answer(np.int64(shard), np.int64(end), np.int64(steps), np.bool_(is_done), None)


def test_an_answer_counts_if_it_follows_those_that_are_counted() -> None:
    data = pass_of(2)
    first, second, other = answer(0, 8, 8), answer(0, 16, 8), answer(1, 3, 3)
    assert data.count([second, first, other]) == [other, first, second]
    for repeated_or_early in (answer(0, 16, 8), answer(0, 32, 8), answer(0, 24, 0, True)):
        assert data.count([repeated_or_early]) == []
    assert data.positions.tolist() == [16, 3]
    last = answer(0, 20, 4, True)
    assert data.count([answer(0, 20, 0, True), last]) == [last]
    assert data.unfinished == {1}


def test_the_rest_of_an_absent_worker_is_left_out() -> None:
    data = pass_of(3)
    data.count([answer(0, 5, 5), answer(1, 8, 8, True), answer(2, 6, 6)])
    with pytest.warns(UserWarning, match="no answer from worker 0, 2 for 60 s"):
        data.leave_out()
    assert not data.unfinished


def test_a_server_that_is_lost_between_steps() -> None:
    """Metrics and counters are read from servers outside of remote calls."""
    reduction = CoordinatorReduction(tf.distribute.get_strategy(), TaskStatus())
    error = pytest.raises(tfd.PeerError, match="its part of the model is lost: failed to connect")
    with error, reduction.call("fit"):
        raise tf.errors.UnavailableError(None, None, "failed to connect to all addresses")


@pytest.mark.parametrize(
    ("file", "is_short"), [("cluster_coordinator.py", True), ("data.py", False)]
)
def test_errors_of_the_coordinator_are_one_line(file: str, is_short: bool) -> None:
    text = "Remote function on worker %s failed with %s"
    array = "UnavailableError\n[0.1 0.2]\n" * 999
    args = "worker:0", array
    record = logging.LogRecord("tensorflow", logging.ERROR, file, 1, text, args, None)
    assert shorten_error(record)
    shown = record.getMessage()
    if not is_short:
        assert shown == text % args
        return
    assert shown.startswith("Remote function on worker worker:0 failed with UnavailableError [0.1")
    assert len(shown) <= 500
    assert "\n" not in shown
