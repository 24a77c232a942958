"""Reports of failed runs, as text."""

from __future__ import annotations

import math
import signal
from collections.abc import Mapping, Sequence

from tfdist_ext.launch.lines import Blame
from tfdist_ext.launch.processes import TaskProcess

__all__ = ["failure_report", "shell_status", "timeout_report"]


def shell_status(returncode: int) -> int:
    """The exit status as shells give it: 128 + n for signal n."""
    return 128 - returncode if returncode < 0 else returncode


def outcome(returncode: int | None) -> str:
    """`exit code 3`, `killed by SIGKILL (signal 9)`, or `still running`."""
    if returncode is None:
        return "still running"
    if returncode >= 0:
        return f"exit code {returncode}"
    known = -returncode in set(map(int, signal.Signals))  # others are real-time signals
    name = signal.Signals(-returncode).name if known else f"SIG{-returncode}"
    return f"killed by {name} (signal {-returncode})"


def failure_report(
    task: TaskProcess,
    verb: str,
    others: Sequence[TaskProcess],
    victim: tuple[TaskProcess, Blame] | None = None,
) -> str:
    """The root cause and its last lines, then what became of the other tasks, in order of time.

    Args:
        task: the root cause.
        verb: what it did: "failed first"; "left", where it ended with 0 and was needed; or "does
            not answer", where it had not ended by itself.
        others: the tasks that were still running then.
        victim: the task that failed because of it, and what that task wrote about it.
    """
    how, after = task.killed_because or outcome(task.returncode), task.ended_after
    if verb == "does not answer":
        how = "its process was still running"
    elif verb == "left":
        how += ", and the others still needed it"
    if victim is not None:  # a task may tell the others of its failure before its process ends
        after = min(after or math.inf, victim[0].ended_after)
    lines = [f"{task.name} {verb}, after {after:.1f} s: {how}"]
    if task.returncode == -signal.SIGKILL and verb == "failed first" and not task.killed_because:
        lines.append("nothing in this run sent that signal: is the machine out of memory?")
    if task.output.last_lines:
        lines.append(f"the last lines of {task.name}:")
        lines += [f"    {line}" for line in task.output.last_lines]
    elif not task.killed_because:
        lines.append(f"{task.name} wrote nothing")
    if task.plan.log_file is not None:
        lines.append(f"its log: {task.plan.log_file}")
    if victim is not None:
        failed, blame = victim
        lines.append(
            f"{failed.name} failed because of {task.name}, after {failed.ended_after:.1f} s:"
            f" {outcome(failed.returncode)}"
        )
        lines.append(f"    {blame.words}")
    if others:
        ended = ", ".join(f"{other.name} {outcome(other.returncode)}" for other in others)
        lines.append(f"then the others ended: {ended}")
    return _text(lines)


def timeout_report(seconds: float, last_lines: Mapping[str, Sequence[str]]) -> str:
    """The tasks that had not ended in time, and the last output of each."""
    last = {name: said[-1] if said else "(wrote nothing)" for name, said in last_lines.items()}
    return _text(
        [
            f"not finished after {seconds:g} s (--timeout); these tasks were still running:",
            *(f"    {name}: {line}" for name, line in last.items()),
        ]
    )


def _text(lines: list[str]) -> str:
    return "".join(f"{line}\n" if line.startswith(" ") else f"tfdist: {line}\n" for line in lines)
