"""A tfdist at the other end of ssh: its standard input says that somebody is there.

The first line is the token of the rendezvous, which would be seen by all users of the machine on a
command line. Then come signals, a name a line, and an empty line every second.
"""

from __future__ import annotations

import contextlib
import io
import queue
import signal
import threading

from tfdist_ext.errors import LaunchError
from tfdist_ext.launch.stop_signals import StopSignals

__all__ = ["BEAT_EVERY", "Attachment"]

BEAT_EVERY = 1.0  # seconds
_GONE_AFTER = 15.0  # seconds without a line


class Attachment:
    """The other end of standard input.

    Attributes:
        token: the first line.

    Raises:
        LaunchError: there is no first line.
    """

    def __init__(self, stream: io.RawIOBase | None = None) -> None:
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        # Without a buffer, whose lock the reading thread would hold at the interpreter's end.
        self._stream = io.FileIO(0, closefd=False) if stream is None else stream
        threading.Thread(target=self._read, name="attached", daemon=True).start()
        try:
            line = self._lines.get(timeout=_GONE_AFTER)
        except queue.Empty:
            line = b""
        if not line:
            raise LaunchError("--attached must come with a token on standard input, got none")
        self.token = line.decode(errors="replace").strip()

    def _read(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            for line in iter(self._stream.readline, b""):
                self._lines.put(line)
        self._lines.put(b"")

    def pass_on(self, stop: StopSignals) -> None:
        """Tell of signals from now on, and of the end of the other side, as SIGHUP."""
        threading.Thread(target=self._pass_on, args=(stop,), name="signals", daemon=True).start()

    def _pass_on(self, stop: StopSignals) -> None:
        while True:
            try:
                line = self._lines.get(timeout=_GONE_AFTER)
            except queue.Empty:
                line = b""
            if not line:
                stop.came(signal.SIGHUP)
                return
            with contextlib.suppress(KeyError):
                stop.came(signal.Signals[line.decode(errors="replace").strip()])
