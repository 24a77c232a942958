"""How many steps to run in one execution: pure arithmetic.

Long executions are fast, because nothing waits for Python between their steps. Short ones show
progress, and let Ctrl-C and callbacks in. So an execution aims at a fixed time.
"""

from __future__ import annotations

__all__ = ["Pace"]


class Pace:
    """Grows the steps of an execution until one takes about `target` seconds.

    It is fed the chief's times only, so that every task of a cluster counts the same.
    """

    def __init__(self, *, fixed: int | None = None, target: float = 0.4, growth: int = 4):
        """`fixed` steps each time, or as many as fit into `target` seconds."""
        self._fixed = fixed
        self._target = target
        self._growth = growth
        self._steps: list[int] = []

    def next(self, remaining: int | None) -> int:
        """Steps for the next execution, at least 1 and at most `remaining`."""
        if self._fixed is not None:
            steps = self._fixed
        elif not self._steps:
            steps = 1  # the first execution compiles; a short one shows early that all is well
        else:
            steps = max(1, min(self._steps[-1] * self._growth, self._most))
        steps = steps if remaining is None else min(steps, remaining)
        self._steps = [*self._steps[-1:], steps]
        return steps

    _most: int = 1 << 20

    def took(self, previous: float) -> None:
        """Learn how many seconds the execution before the last one took; 0 says nothing.

        One execution late, because a time travels to the other tasks with the next execution.
        """
        if len(self._steps) == 2 and previous > 0:
            self._most = max(1, int(self._target * self._steps[0] / max(previous, 1e-9)))
