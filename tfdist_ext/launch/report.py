"""What a person reads when a run has not gone well: pure functions from facts to text."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

__all__ = [
    "Blame",
    "blame_in",
    "failure_report",
    "log_report",
    "outcome",
    "peer_failure_report",
    "shell_status",
    "timeout_report",
]

# The last line of a PeerError's traceback; what TensorFlow logs where one's process is gone.
_BLAMES = (
    re.compile(r"PeerError: (?P<words>(?P<job>\w+):(?P<index>\d+) .*)"),
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
    name: str,
    returncode: int,
    seconds: float,
    last_lines: Sequence[str],
    log_file: Path | None,
    others: Mapping[str, int | None],
    *,
    verb: str = "failed first",
) -> str:
    """The root cause, with its last words and where to read more, then what became of the others.

    Args:
        name, returncode: the task that failed first.
        seconds: how long the run had lasted when it did.
        others: the return codes of the tasks that were still running then.
        verb: what it did: "failed first", or "left", where it ended with 0 and was needed.
    """
    lines = [f"{name} {verb}, after {seconds:.1f} s: {outcome(returncode)}"]
    if returncode == -signal.SIGKILL:
        lines.append("nothing in this run sent that signal: is the machine out of memory?")
    if last_lines:
        lines.append(f"the last lines of {name}:")
        lines += [f"    {line}" for line in last_lines]
    else:
        lines.append(f"{name} wrote nothing")
    if log_file is not None:
        lines.append(f"its log: {log_file}")
    if others:
        ended = ", ".join(f"{other} {outcome(code)}" for other, code in others.items())
        lines.append(f"then the others ended: {ended}")
    return _text(lines)


def peer_failure_report(
    name: str, returncode: int, seconds: float, blame: Blame, then: float | None, at: str
) -> str:
    """What failed because of another task.

    Args:
        name, returncode, seconds: the task that failed, and how long the run had lasted.
        blame: its words about the other task.
        then: how long the run had lasted when the other one ended with 0; None where it did not.
        at: the time of day then.
    """
    lines = []
    if then is not None:
        lines.append(
            f"{blame.task} left with exit code 0 at {at}, after {then:.1f} s, and the others still"
            " needed it"
        )
        lines.append(f"{name} failed because of it, {seconds - then:.1f} s later:")
    else:
        lines.append(
            f"{name} failed because of {blame.task}, after {seconds:.1f} s: {outcome(returncode)}:"
        )
    return _text([*lines, f"    {blame.words}"])


def timeout_report(seconds: float, last_lines: Mapping[str, Sequence[str]]) -> str:
    """Who had not ended in time, and the last thing each of them said."""
    lines = [f"not finished after {seconds:g} s (--timeout); these tasks were still running:"]
    for name, said in last_lines.items():
        lines.append(f"    {name}: {said[-1] if said else '(wrote nothing)'}")
    return _text(lines)


def log_report(errors: Mapping[str, OSError]) -> str:
    """Whose log files lack the end of what the task wrote, and why; no text where all are whole."""
    return _text(
        [
            f"the log file of {name} is incomplete: {error}; the run goes on, free some space or"
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
