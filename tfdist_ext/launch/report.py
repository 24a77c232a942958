"""Reports of failed runs: pure functions from facts to text."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tfdist_ext.launch.processes import TaskProcess


__all__ = [
    "Blame",
    "blame_in",
    "failure_report",
    "log_report",
    "peer_failure_report",
    "shell_status",
    "timeout_report",
]

# The last line of a PeerError's traceback, and of the error that a task is missing at the start;
# what TensorFlow logs where one's process is gone.
_BLAMES = (
    re.compile(r"PeerError: (?P<words>(?P<job>\w+):(?P<index>\d+) .*)"),
    re.compile(r"StrategyError: (?P<words>.* no answer from (?P<job>\w+):(?P<index>\d+) .*)"),
    re.compile(r"(?P<words>Error reported from /job:(?P<job>\w+)/task:(?P<index>\d+).*)"),
)


class Blame(NamedTuple):
    """What a task has written about another one.

    Attributes:
        task: because of which it failed, as "worker:1".
        words: its sentence.
    """

    task: str
    words: str


def blame_in(line: str) -> Blame | None:
    """The task that a line of output blames, if it does."""
    for pattern in _BLAMES:
        if found := pattern.search(line):
            return Blame(f"{found['job']}:{found['index']}", found["words"])
    return None


def shell_status(returncode: int) -> int:
    """The exit status as shells give it: 128 + n for signal n."""
    return 128 - returncode if returncode < 0 else returncode


def outcome(returncode: int | None) -> str:
    """`exit code 3`, `killed by SIGKILL (signal 9)`, or `still running`."""
    if returncode is None:
        return "still running"
    if returncode >= 0:
        return f"exit code {returncode}"
    return f"killed by {_signal_name(-returncode)} (signal {-returncode})"


def failure_report(
    task: TaskProcess, verb: str, last_lines: Sequence[str], others: Sequence[TaskProcess]
) -> str:
    """The root cause, with its last words and where to read more, then what became of the others.

    Args:
        task: the root cause.
        verb: what it did: "failed first", or "left", where it ended with 0 and was needed.
        others: the tasks that were still running then.
    """
    how = task.killed_because or outcome(task.returncode)
    lines = [f"{task.name} {verb}, after {task.ended_after:.1f} s: {how}"]
    if task.returncode == -signal.SIGKILL and not task.killed_because:
        lines.append("nothing in this run sent that signal: is the machine out of memory?")
    if last_lines:
        lines.append(f"the last lines of {task.name}:")
        lines += [f"    {line}" for line in last_lines]
    elif not task.killed_because:
        lines.append(f"{task.name} wrote nothing")
    if task.log:
        lines.append(f"its log: {task.log}")
    if others:
        ended = ", ".join(f"{other.name} {outcome(other.returncode)}" for other in others)
        lines.append(f"then the others ended: {ended}")
    return _text(lines)


def peer_failure_report(
    task: TaskProcess, blame: Blame, left: TaskProcess | None, at: time.struct_time
) -> str:
    """The report of a task that failed because of another one.

    Args:
        task: the task that failed.
        blame: its words about the other task.
        left: the other one, where it ended with 0.
        at: the time of day then.
    """
    after = f"after {task.ended_after:.1f} s"
    lines = [f"{task.name} failed because of {blame.task}, {after}: {outcome(task.returncode)}:"]
    if left is not None:
        later = task.ended_after - left.ended_after
        lines = [
            f"{left.name} left with exit code 0 at {time.strftime('%H:%M:%S', at)}, after"
            f" {left.ended_after:.1f} s, and the others still needed it",
            f"{task.name} failed because of it, {later:.1f} s later:",
        ]
    return _text([*lines, f"    {blame.words}"])


def timeout_report(seconds: float, last_lines: Mapping[str, Sequence[str]]) -> str:
    """The tasks that had not ended in time, and the last output of each."""
    last = {name: said[-1] if said else "(wrote nothing)" for name, said in last_lines.items()}
    return _text(
        [
            f"not finished after {seconds:g} s (--timeout); these tasks were still running:",
            *(f"    {name}: {line}" for name, line in last.items()),
        ]
    )


def log_report(errors: Mapping[str, OSError]) -> str:
    """The tasks whose log files are incomplete, and why; no text where all are complete."""
    return _text(
        [
            f"the log file of {name} is incomplete: {error}; the run continues: free some space or"
            " give another folder with --log-dir"
            for name, error in errors.items()
        ]
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"SIG{number}"


def _text(lines: list[str]) -> str:
    return "".join(f"{line}\n" if line.startswith(" ") else f"tfdist: {line}\n" for line in lines)
