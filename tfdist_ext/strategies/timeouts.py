"""A call that may never return, given a limit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

__all__ = ["call_with_timeout"]

Result = TypeVar("Result")


def call_with_timeout(seconds: float, call: Callable[[], Result]) -> Result:
    """Return or raise what `call` does, within a time limit.

    It runs in a thread of its own. One that takes too long is left behind; it does not keep the
    process from ending.

    Raises:
        TimeoutError: it took longer than `seconds`.
    """
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="tfdist-bounded", daemon=True).start()
    if not wait([future], seconds).done:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return future.result()
