"""Which end of a run is followed by another start, and by which workers; starts no process."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist_ext.errors import LaunchError
from tfdist_ext.launch.exit_codes import FAILED, PREEMPTED, RESTART
from tfdist_ext.launch.restarts import Attempt, RestartPolicy, next_attempt

KILLED = 128 + 9
THREE = (0, 1, 2)


def policy(max_restarts: int = 3, min_workers: int = 3) -> RestartPolicy:
    return RestartPolicy(max_restarts, 3, min_workers)


def end(status: int, failed: int | None = None, workers: tuple[int, ...] = THREE, **more: object):
    return Attempt(status, workers, seconds=60.0, failed=failed, **more)


@pytest.mark.parametrize(
    ("past", "workers", "why"),
    [
        ([end(KILLED, 1)], THREE, "restart 1 of 3"),
        ([end(RESTART, 1), end(KILLED, 2)], THREE, "restart 2 of 3"),
        ([end(3, 1)], None, "exit code 3 is a permanent failure: not started again"),
        ([end(FAILED, 1)], None, "exit code 1 is a permanent failure: not started again"),
        ([end(FAILED, 1, raised="OSError")], THREE, "restart 1 of 3"),
        (
            [
                end(FAILED, 1, raised="OSError"),
                end(KILLED, 2),
                end(FAILED, 0, raised="OSError"),
            ],
            None,
            "the same exception as before: not started again",
        ),
        (
            [end(FAILED, 1, raised="OSError"), end(FAILED, 1, raised="KeyError")],
            THREE,
            "restart 2 of 3",
        ),
        ([end(KILLED, 1)] * 4, None, "all 3 restarts (--max-restarts) are used up"),
        ([end(PREEMPTED, 1)] * 9, THREE, "preempted; this start does not count"),
    ],
)
def test_what_follows(past: list[Attempt], workers: tuple[int, ...] | None, why: str) -> None:
    assert next_attempt(policy(), past) == (workers, why)


def test_a_run_that_is_preempted_at_once_does_not_start_again_without_end() -> None:
    at_once = Attempt(PREEMPTED, THREE, seconds=1.0)
    assert next_attempt(policy(2), [at_once] * 2)[0] == THREE
    assert next_attempt(policy(2), [at_once] * 3)[0] is None


def test_a_worker_that_fails_again_and_again_is_left_out() -> None:
    rules = policy(5, min_workers=2)
    past = [end(KILLED, 1), end(KILLED, 1)]
    why = "restart 2 of 5; worker 1 has failed 2 times in a row and is left out: 2 workers"
    assert next_attempt(rules, past) == ((0, 2), why)
    # No fewer than asked for.
    past.append(end(KILLED, 2, (0, 2)))
    past.append(end(KILLED, 2, (0, 2)))
    assert next_attempt(rules, past)[0] == (0, 2)


def test_different_workers_that_fail_stay() -> None:
    past = [end(KILLED, 1), end(KILLED, 2), end(KILLED, 1)]
    assert next_attempt(policy(min_workers=1), past)[0] == THREE


@given(st.lists(st.sampled_from([KILLED, RESTART, PREEMPTED, FAILED]), max_size=12))
def test_a_run_ends(statuses: list[int]) -> None:
    """There are never more starts that count than were asked for."""
    past: list[Attempt] = []
    for status in statuses:
        past.append(Attempt(status, THREE, seconds=1.0, failed=0))
        if next_attempt(policy(2), past)[0] is None:
            break
    assert len(past) <= 3


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ((-1, 3, 3), "--max-restarts must be an integer of at least 0, got -1"),
        ((3, 3, 4), "--min-workers must be an integer from 1 to 3, got 4"),
        ((0, 3, 2), "--min-workers 2 needs --max-restarts"),
    ],
)
def test_numbers_that_make_no_sense(numbers: tuple[int, int, int], said: str) -> None:
    with pytest.raises(LaunchError, match=said):
        RestartPolicy(*numbers)
