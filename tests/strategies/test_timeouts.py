"""A call with a limit."""

import threading
import time

import pytest

from tfdist_ext.strategies.timeouts import call_with_timeout


def test_what_it_returns_and_raises_comes_through() -> None:
    assert call_with_timeout(5, lambda: 3) == 3
    assert call_with_timeout(5, lambda: None) is None
    with pytest.raises(ZeroDivisionError):
        call_with_timeout(5, lambda: 1 / 0)


def test_one_that_hangs_is_left_behind() -> None:
    release = threading.Event()
    started = time.monotonic()
    with pytest.raises(TimeoutError, match=r"no answer within 0\.1 s"):
        call_with_timeout(0.1, release.wait)
    assert time.monotonic() - started < 2
    release.set()
