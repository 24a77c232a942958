"""Which task a failure blames, and what exit functions see of it."""

from __future__ import annotations

import sys

import pytest

from tfdist_ext.errors import PeerError, StrategyError
from tfdist_ext.failures import record


def peer_error(task: str) -> PeerError:
    error = PeerError(f"{task} is gone")
    error.task = task
    return error


def missing_error(missing: str) -> StrategyError:
    error = StrategyError("tasks are missing")
    error.missing = missing
    return error


def caused(error: BaseException, cause: Exception) -> BaseException:
    error.__context__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "peer"),
    [
        (OSError("disk full"), ""),
        (peer_error("worker:1"), "worker:1"),
        (peer_error(""), ""),
        (missing_error("ps:0 (a:1), ps:1 (b:1)"), "ps:0"),
        (caused(RuntimeError("training failed"), peer_error("worker:2")), "worker:2"),
        (caused(SystemExit("training failed"), peer_error("worker:2")), "worker:2"),
        # As TensorFlow's collectives raise it after the end of a worker.
        (RuntimeError("Error reported from /job:worker/task:12: it is gone"), "worker:12"),
    ],
)
def test_failure_blames_the_peer_of_the_error_or_its_cause(
    error: BaseException, peer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "last_value", None, raising=False)
    failure = record(error)
    assert (failure.peer, failure.type, failure.message) == (peer, type(error).__name__, str(error))
    assert sys.last_value is error
