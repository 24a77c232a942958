"""Reads bytes of a file, local or remote, at any offset."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

import tensorflow as tf

from tfdist_ext.errors import DataError

__all__ = ["FileReader", "is_local", "stamp_of"]


def is_local(path: str) -> bool:
    """Whether a path is one of the operating system's, and not for example `gs://`."""
    return "://" not in path


def stamp_of(path: str) -> tuple[int, int]:
    """The size of a file, and its modification time in nanoseconds (0 if unknown).

    Raises:
        DataError: the file does not exist, cannot be read, or is a folder.
    """
    try:
        found = tf.io.gfile.stat(path)
    except tf.errors.OpError as error:
        raise DataError(f"{path} cannot be read: {error.message}.") from None
    if found.is_directory:
        raise DataError(f"{path} must be a file, got a folder; give a pattern for the files in it.")
    return found.length, found.mtime_nsec


class FileReader:
    """An open file, which is closed when the last reference to the reader is gone.

    A local file is read with `os.pread`, by any number of threads. Any other file is read through
    `tf.io.gfile`, by one thread at a time.

    Raises:
        DataError: the file cannot be opened.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._file: Any = None if is_local(path) else tf.io.gfile.GFile(path, "rb")
        try:
            if self._file is not None:
                self._file.read(0)  # opens the file
            else:
                self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                weakref.finalize(self, os.close, self._descriptor)
        except (OSError, tf.errors.OpError) as error:
            raise DataError(f"{path} cannot be read: {error}.") from None

    def read_at(self, offset: int, count: int) -> bytes:
        """The bytes from an offset on; fewer than `count` only at the end of the file.

        Raises:
            DataError: the file cannot be read.
        """
        try:
            if self._file is None:
                return os.pread(self._descriptor, count, offset)
            with self._lock:
                self._file.seek(offset)
                return self._file.read(count)
        except (OSError, tf.errors.OpError) as error:
            raise DataError(f"{self._path} cannot be read: {error}.") from None
