"""Files: which ones a pattern matches, and reading their bytes, local or remote."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterable
from typing import Any, TypeAlias

import tensorflow as tf

from tfdist_ext.errors import DataError
from tfdist_ext.messages import shown

__all__ = ["INDEX_SUFFIX", "FileReader", "Patterns", "files_of", "is_local", "stamp_of"]

INDEX_SUFFIX = ".tfdindex"  # the index of the file `name` is the file `.name.tfdindex` beside it

Patterns: TypeAlias = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


def files_of(patterns: Patterns) -> list[str]:
    """All files that patterns match, each once, sorted; without index files of this package.

    Raises:
        DataError: there are no patterns, or a pattern matches no file.
    """
    if isinstance(patterns, str | bytes | os.PathLike) or not isinstance(patterns, Iterable):
        patterns = [patterns]
    given = list(patterns)
    if not given or not all(isinstance(pattern, str | os.PathLike) for pattern in given):
        raise DataError(f"files must be a pattern or path, or a list of them, got {shown(given)}.")
    found = set().union(*(_matches(os.fspath(pattern)) for pattern in given))
    # One file may be given in several spellings: "a", "./a".
    one_each = {os.path.abspath(path) if is_local(path) else path: path for path in sorted(found)}
    return sorted(one_each.values())


def _matches(pattern: str) -> set[str]:
    try:
        if tf.io.gfile.exists(pattern):  # a name with "[1]" in it is itself, not a pattern
            return {pattern}
        found = {path for path in tf.io.gfile.glob(pattern) if not _is_index(path)}
    except tf.errors.OpError as error:
        raise DataError(f"{pattern!r} cannot be searched: {error.message}.") from None
    if not found:
        where = f" (from {os.getcwd()})" if is_local(pattern) and not os.path.isabs(pattern) else ""
        raise DataError(
            f"no file matches {pattern!r}{where}. Check that the folder exists on this machine."
        )
    return found


def _is_index(path: str) -> bool:
    """Whether a file is an index or an unfinished one, which patterns for data match, too."""
    name = path.rpartition("/")[2]
    return name.startswith(".") and INDEX_SUFFIX in name


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
