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
        self._steps: list[int] = []  # of the last two executions
        self._largest = 0
        self._most: int | None = None  # that fit into the target, once a time has told
        self._compiled = False
        self._measured = False

    def next(self, remaining: int | None) -> int:
        """Steps for the next execution, at least 1 and at most `remaining`."""
        # The first execution compiles; a short one shows early that all is well.
        steps = self._fixed or max(1, self._largest * self._growth)
        if self._fixed is None and self._most is not None:
            steps = min(steps, self._most)
        steps = steps if remaining is None else min(steps, remaining)
        self._largest = max(self._largest, steps)
        self._steps = [*self._steps[-1:], steps]
        return steps

    def took(self, previous: float) -> None:
        """Learn how many seconds the execution before the last one took.

        One execution late, because a time travels to the other tasks with the next execution.
        """
        if len(self._steps) < 2:
            return
        long = previous > self._target / 8  # what is shorter is mostly the call itself
        if long:
            self._most = max(1, int(self._target * self._steps[0] / previous))
        elif not self._measured:
            self._most = None
        # The first time is the compiler's: it holds until another one is there.
        self._measured = self._compiled and (long or self._measured)
        self._compiled = True
