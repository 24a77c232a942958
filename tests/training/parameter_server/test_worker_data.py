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


def test_a_server_that_is_lost_between_steps() -> None:
    """Metrics and counters are read from servers outside of remote calls."""
    reduction = CoordinatorReduction(tf.distribute.get_strategy(), TaskStatus())
    error = pytest.raises(tfd.PeerError, match="its part of the model is lost: failed to connect")
    with error, reduction.call("fit"):
        raise tf.errors.UnavailableError(None, None, "failed to connect to all addresses")


def test_errors_of_the_coordinator_are_one_line() -> None:
    text, file = "Remote function on worker %s failed with %s", "cluster_coordinator.py"
    args = "worker:0", "UnavailableError\n[0.1 0.2]\n" * 999
    record = logging.LogRecord("tensorflow", logging.ERROR, file, 1, text, args, None)
    assert shorten_error(record)
    shown = record.getMessage()
    assert shown.startswith("Remote function on worker worker:0 failed with UnavailableError [0.1")
    assert len(shown) <= 500
    assert "\n" not in shown
