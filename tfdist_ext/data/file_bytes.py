"""Any bytes of a file, local or remote, by offset; and what identifies its present content.

A local file is read with `os.pread`: just the bytes asked for, from any number of threads. Whatever
else `tf.io.gfile` opens (`gs://`, `hdfs://`, `ram://`) is read through it, one thread at a time; it
reads ahead by 512 KiB of its own.
"""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import tensorflow as tf

from tfdist_ext.errors import DataError

__all__ = ["FileBytes", "Stamp", "is_local", "open_bytes", "stamp_of"]


class Stamp(NamedTuple):
    """A file's content, as far as it can be told without reading it.

    Attributes:
        size: in bytes.
        modified_ns: when it was last written, in nanoseconds since 1970; 0 where the file system
            does not know.
    """

    size: int
    modified_ns: int


def is_local(path: str) -> bool:
    """Whether the operating system opens it, and not TensorFlow."""
    return "://" not in path


def stamp_of(path: str) -> Stamp:
    """
    Raises:
        DataError: there is no such file, it may not be looked at, or it is a folder.
    """
    try:
        if is_local(path):
            found = os.stat(path)
            folder, stamp = stat.S_ISDIR(found.st_mode), Stamp(found.st_size, found.st_mtime_ns)
        else:
            looked = tf.io.gfile.stat(path)
            folder, stamp = looked.is_directory, Stamp(looked.length, looked.mtime_nsec)
    except (OSError, tf.errors.OpError) as error:
        raise unreadable(path, error) from None
    if folder:
        raise DataError(f"{path} must be a file, got a folder; give a pattern for the files in it.")
    return stamp


class FileBytes(Protocol):
    """An open file, local or remote."""

    def read_at(self, offset: int, count: int) -> bytes:
        """The bytes from an offset on; fewer only where the file ends.

        Raises:
            DataError: the file cannot be read.
        """


def open_bytes(path: str) -> FileBytes:
    """A file, open to be read at any offset; it is closed when the last reference is gone.

    Raises:
        DataError: the file cannot be opened.
    """
    try:
        return _Local(path) if is_local(path) else _Remote(path)
    except (OSError, tf.errors.OpError) as error:
        raise unreadable(path, error) from None


def unreadable(path: str | Path, error: Exception) -> DataError:
    """The error to raise when a file system has refused."""
    # What an OpError has, and what an OSError has.
    why = getattr(error, "message", None) or getattr(error, "strerror", None) or str(error)
    return DataError(f"{path} cannot be read: {why}.")


class _Local:
    def __init__(self, path: str) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read_at(self, offset: int, count: int) -> bytes:
        try:
            data = os.pread(self._descriptor, count, offset)
            while len(data) < count:  # a call may give less than there is (at most 2 GiB on Linux)
                more = os.pread(self._descriptor, count - len(data), offset + len(data))
                if not more:
                    break
                data += more
        except OSError as error:
            raise unreadable(self.path, error) from None
        return data

    def __del__(self) -> None:
        # Not earlier: another thread may be reading, and the number would mean another file.
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)


class _Remote:
    def __init__(self, path: str) -> None:
        self.path = path
        self._file: Any = tf.io.gfile.GFile(path, "rb")
        self._file.read(0)  # opens it
        self._lock = threading.Lock()

    def read_at(self, offset: int, count: int) -> bytes:
        try:
            with self._lock:  # a place in the file, and then a read from there
                self._file.seek(offset)
                return self._file.read(count)
        except tf.errors.OpError as error:
            raise unreadable(self.path, error) from None
