"""Values of options of the command line."""

from __future__ import annotations

import argparse
import signal

__all__ = ["seconds", "stop_signal"]

_ASK_TO_END = ["SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGINT", "SIGXCPU"]


def seconds(text: str) -> float:
    """A time.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1e9:
        raise argparse.ArgumentTypeError(f"seconds must be a number from 0, got {text!r}")
    return value


def stop_signal(text: str) -> signal.Signals:
    """A signal that may ask a process to end, with or without SIG before it.

    Raises:
        argparse.ArgumentTypeError: another one.
    """
    name = text if text.startswith("SIG") else f"SIG{text}"
    if name not in _ASK_TO_END:
        raise argparse.ArgumentTypeError(
            f"a signal must be one of {', '.join(_ASK_TO_END)}, got {text!r}"
        )
    return signal.Signals[name]
