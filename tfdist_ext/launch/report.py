"""Reports of failed runs, as text."""

from __future__ import annotations

import math
import signal
from collections.abc import Sequence
from typing import Literal, TypeAlias

from tfdist_ext.launch.lines import Blame
from tfdist_ext.launch.processes import TaskProcess

__all__ = ["Verb", "failure_report", "shell_status"]

Verb: TypeAlias = Literal["failed", "was preempted", "left", "does not answer"]


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
    verb: Verb,
    others: Sequence[TaskProcess],
    victim: tuple[TaskProcess, Blame] | None = None,
) -> str:
    """The root cause and its last lines, then what became of the other tasks, in order of time.

    Args:
        task: the root cause.
        verb: "left" if it ended with 0 and was needed; "does not answer" if it had not ended.
        others: the tasks that were still running then.
        victim: the task that failed because of it, and what that task wrote about it.
    """
    returncode = None if verb == "does not answer" else task.returncode  # tfdist killed it later
    how, after = task.killed_because or outcome(returncode), task.ended_after
    if verb == "left":
        how += ", and the others still needed it"
    if victim is not None:  # a task may tell the others of its failure before its process ends
        after = min(after or math.inf, victim[0].ended_after)
    what = "failed first" if verb == "failed" else verb
    lines = [f"{task.name} {what}, after {after:.1f} s: {how}"]
    if task.returncode == -signal.SIGKILL and verb == "failed" and not task.killed_because:
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
    return "".join(f"{line}\n" if line.startswith(" ") else f"tfdist: {line}\n" for line in lines)
