"""What a person reads when a run has not gone well: pure functions from facts to text."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["failure_report", "log_report", "outcome", "shell_status", "timeout_report"]


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
) -> str:
    """The root cause, with its last words and where to read more, then what became of the others.

    Args:
        name, returncode: the task that failed first.
        seconds: how long the run had lasted when it did.
        others: the return codes of the tasks that were still running then.
    """
    lines = [f"{name} failed first, after {seconds:.1f} s: {outcome(returncode)}"]
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
