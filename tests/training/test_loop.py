"""A Ctrl-C that Python drops is raised later."""

from __future__ import annotations

import os
import signal

import pytest

from tfdist_ext.training.loop import preserve_sigint


class Dropped:
    """Its finalizer is where the Ctrl-C arrives."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):  # Python looks for signals between bytecodes
            pass


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_lost_in_a_finalizer_is_raised_by_the_next_check() -> None:
    with preserve_sigint() as check:
        check()
        dropped = Dropped()
        del dropped
        with pytest.raises(KeyboardInterrupt):
            check()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_of_the_users_own_stays() -> None:
    seen = []
    before = signal.signal(signal.SIGINT, lambda *_: seen.append("own"))
    try:
        with preserve_sigint() as check:
            os.kill(os.getpid(), signal.SIGINT)
            check()
        assert seen == ["own"]
    finally:
        signal.signal(signal.SIGINT, before)
