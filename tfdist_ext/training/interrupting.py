"""Ctrl-C that is never lost.

Python raises KeyboardInterrupt wherever the main thread is. In a finalizer, of which TensorFlow's
eager code runs one for each batch that it reads, the exception is printed and dropped, and the
training would go on.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["keeping_ctrl_c"]


@contextlib.contextmanager
def keeping_ctrl_c() -> Iterator[Callable[[], None]]:
    """Scope that gives a function, which raises the KeyboardInterrupt that was lost, if any.

    Where Ctrl-C does something of the user's own, or this is not the main thread, nothing is
    changed.
    """
    pressed = False

    def raise_interrupt(*_: Any) -> None:
        nonlocal pressed
        pressed = True
        raise KeyboardInterrupt

    def check() -> None:
        if pressed:
            raise KeyboardInterrupt

    own = signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    if own or threading.current_thread() is not threading.main_thread():
        yield check
        return
    signal.signal(signal.SIGINT, raise_interrupt)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
