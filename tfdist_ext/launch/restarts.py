"""Starting a run again: what follows from how it ended, a pure function of what was so far."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from tfdist_ext.errors import LaunchError
from tfdist_ext.launch.exit_codes import DONE, PREEMPTED

__all__ = ["Attempt", "Next", "RestartOn", "RestartPolicy", "next_attempt"]

AGAIN_AND_AGAIN = 2  # failures in a row of one worker, after which it is left out
_AT_ONCE = 10.0  # seconds; a preemption before counts, or a run could start again without end
_EXCEPTION = "exception"
_CODES = re.compile(r"(\d{1,3})(?:-(\d{1,3}))?")


@dataclass(frozen=True)
class RestartOn:
    """The ends of a task after which a run starts again.

    Attributes:
        codes: exit statuses; 128 + n is signal n.
        exceptions: a Python exception, too, where it comes from another place than those before.
    """

    codes: frozenset[int] = frozenset(range(128, 256))
    exceptions: bool = True

    @classmethod
    def parse(cls, text: str) -> RestartOn:
        """Of words with commas between: exit codes, ranges of them, "exception".

        Raises:
            LaunchError: anything else, or a code that is none.
        """
        words = [word.strip() for word in text.split(",") if word.strip()]
        codes: set[int] = set()
        for word in words:
            if word == _EXCEPTION:
                continue
            match = _CODES.fullmatch(word)
            low = int(match[1]) if match else 0
            high = int(match[2] or low) if match else 0
            if not 1 <= low <= high <= 255:
                raise LaunchError(
                    f"--restart-on must be exit codes from 1 to 255, ranges of them, and"
                    f" {_EXCEPTION!r}, got {word!r}; write, for example:"
                    f" --restart-on {_EXCEPTION},75,128-255"
                )
            codes.update(range(low, high + 1))
        return cls(frozenset(codes), _EXCEPTION in words)


@dataclass(frozen=True)
class RestartPolicy:
    """When a run is started again, and with how many workers.

    Attributes:
        max_restarts: how often; preemptions do not count.
        workers: how many there are when all of them are there.
        min_workers: how many are enough; a worker that fails again and again is left out.
        on: the ends that are worth it.

    Raises:
        LaunchError: numbers that make no sense.
    """

    max_restarts: int
    workers: int
    min_workers: int
    on: RestartOn = field(default_factory=RestartOn)

    def __post_init__(self) -> None:
        if self.max_restarts < 0:
            raise LaunchError(
                f"--max-restarts must be a number of at least 0, got {self.max_restarts}; 3, for"
                " example"
            )
        if self.min_workers != self.workers and not 1 <= self.min_workers < self.workers:
            raise LaunchError(
                f"--min-workers must be from 1 to the number of workers, {self.workers}, got"
                f" {self.min_workers}; change it, or leave it out"
            )
        if self.min_workers < self.workers and not self.max_restarts:
            raise LaunchError(
                f"--min-workers {self.min_workers} must come with --max-restarts, got none: workers"
                " are left out when the run starts again; add --max-restarts 3"
            )


@dataclass(frozen=True)
class Attempt:
    """How one start of a run ended.

    Attributes:
        status: the exit status of the run.
        workers: those that took part, each by its number among all.
        seconds: that it took.
        failed: the worker that was the root cause, by its number among all; None: no worker.
        raised: where a Python exception came from that was the root cause; "" where it was none.
        lost: a task does not answer, and the others have failed because of that.
        stopped: a signal to the launcher or its time limit has ended it.
    """

    status: int
    workers: tuple[int, ...]
    seconds: float = 0.0
    failed: int | None = None
    raised: str = ""
    lost: bool = False
    stopped: bool = False


@dataclass(frozen=True)
class Next:
    """What comes after an attempt.

    Attributes:
        workers: of the next start, each by its number among all; None: there is none.
        why: a sentence for a person; "" where there is nothing to say.
    """

    workers: tuple[int, ...] | None = None
    why: str = ""


def next_attempt(policy: RestartPolicy, past: Sequence[Attempt]) -> Next:
    """What comes after the last of these attempts."""
    last = past[-1]
    if last.status == DONE or last.stopped or not policy.max_restarts:
        return Next()
    if last.status == PREEMPTED and not _counts(last):
        return Next(last.workers, "preempted; this start does not count")
    if last.raised:
        if not policy.on.exceptions:
            return Next(why="--restart-on has no exceptions: not started again")
        if any(attempt.raised == last.raised for attempt in past[:-1]):
            return Next(why="the same exception as before, in the same place: not started again")
    elif last.status not in policy.on.codes and not last.lost:
        return Next(why=f"exit code {last.status} is a permanent failure: not started again")
    failures = sum(map(_counts, past))
    if failures > policy.max_restarts:
        return Next(why=f"all {policy.max_restarts} restarts (--max-restarts) are used up")
    workers, left_out = _without_the_failing(policy, past)
    return Next(workers, f"restart {failures} of {policy.max_restarts}{left_out}")


def _counts(attempt: Attempt) -> bool:
    if attempt.status == PREEMPTED and attempt.seconds >= _AT_ONCE:
        return False
    return attempt.status != DONE


def _without_the_failing(
    policy: RestartPolicy, past: Sequence[Attempt]
) -> tuple[tuple[int, ...], str]:
    """The workers of the next start, and what to say of the one that is left out."""
    workers = past[-1].workers
    last = [attempt.failed for attempt in past if _counts(attempt)][-AGAIN_AND_AGAIN:]
    failing = last[-1]
    again = len(last) == AGAIN_AND_AGAIN and len(set(last)) == 1
    if failing is None or not again or len(workers) <= policy.min_workers:
        return workers, ""
    left = tuple(worker for worker in workers if worker != failing)
    times = f"failed {AGAIN_AND_AGAIN} times in a row"
    return left, f"; worker {failing} has {times} and is left out: {len(left)} workers"
