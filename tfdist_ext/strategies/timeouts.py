"""A call that may never return, given a limit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

__all__ = ["call_with_timeout"]

Result = TypeVar("Result")


def call_with_timeout(seconds: float, call: Callable[[], Result]) -> Result:
    """What `call` returns or raises.

    It runs in a thread of its own. One that takes too long is left behind; it does not keep the
    process from ending.

    Raises:
        TimeoutError: it took longer than `seconds`.
    """
    outcome: list[Result] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(call())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run, name="tfdist-bounded", daemon=True)
    thread.start()
    thread.join(seconds)
    if failure:
        raise failure[0]
    if not outcome:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return outcome[0]
