"""SIGTERM while a worker trains: at once between two meetings, else at the end of one."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from tfdist_ext.training.agreement.termination import Termination


@pytest.fixture
def termination() -> Termination:
    return Termination()


def test_it_ends_the_process_with_143_and_the_handler_is_restored(termination: Termination) -> None:
    with pytest.raises(SystemExit) as ended, termination.handled():
        os.kill(os.getpid(), signal.SIGTERM)
    assert ended.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.set_wakeup_fd(-1) == -1
    with pytest.raises(SystemExit):  # the first one may have been dropped in a finalizer
        termination.check()


def test_what_is_deferred_is_raised_by_the_next_check(termination: Termination) -> None:
    with termination.handled():
        termination.check()
        termination.deferred = True
        os.kill(os.getpid(), signal.SIGTERM)
        assert termination.received is not None
        with pytest.raises(SystemExit):
            termination.check()


def test_another_thread_learns_of_it_while_the_main_thread_cannot(termination: Termination) -> None:
    termination.deferred = True
    with termination.handled():
        os.kill(os.getpid(), signal.SIGTERM)
        termination.received = None  # as if Python had not run the handler yet
        waiting = threading.Thread(target=lambda: termination.wait(10.0))
        waiting.start()
        waiting.join(5.0)
        assert termination.received is not None


def test_an_own_handler_and_other_threads_are_left_alone(
    termination: Termination,
) -> None:
    seen = []
    before = signal.signal(signal.SIGTERM, lambda *_: seen.append("own"))
    try:
        with termination.handled():
            os.kill(os.getpid(), signal.SIGTERM)
        assert seen == ["own"]
        assert termination.received is None
    finally:
        signal.signal(signal.SIGTERM, before)

    def body() -> None:
        with termination.handled():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == ["own", signal.SIG_DFL]
