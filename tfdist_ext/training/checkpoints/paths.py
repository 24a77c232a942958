"""Files that are complete or absent, on this machine or in a remote store.

Paths are strings. `tf.io.gfile` opens all of them: `gs://`, `hdfs://`, and local files. A store
without renames in place, such as Google Cloud Storage, copies and deletes instead.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdist_ext.errors import TrainingError

__all__ = [
    "atomic_write",
    "check_writable",
    "checkpoint_folder",
    "error_if_unwritable",
    "names_in",
    "open_file",
    "os_errors",
    "remove",
    "rename",
    "write_text",
]


def checkpoint_folder(checkpoint_dir: str | os.PathLike[str]) -> str:
    """Returns the folder that `fit(checkpoint_dir=...)` names.

    Raises:
        TrainingError: not a path, or an empty one.
    """
    got = f"got {checkpoint_dir!r}"
    if not isinstance(checkpoint_dir, str | os.PathLike) or not str(checkpoint_dir).strip():
        raise TrainingError(
            f"checkpoint_dir must be the path of a folder, {got}. Pass None for no checkpoints, or"
            ' "." for the working folder.'
        )
    if "\0" in str(checkpoint_dir):
        raise TrainingError(f"checkpoint_dir must be a path without null characters, {got}.")
    path = os.fspath(checkpoint_dir)
    return path.rstrip("/") or "/"


@contextlib.contextmanager
def os_errors(path: str) -> Iterator[None]:
    """Scope of file operations: TensorFlow's errors become OSErrors."""
    try:
        yield
    except tf.errors.NotFoundError as error:
        raise FileNotFoundError(None, error.message, path) from error
    except tf.errors.OpError as error:
        raise OSError(None, error.message, path) from error


@contextlib.contextmanager
def error_if_unwritable(folder: str, argument: str) -> Iterator[None]:
    """Creates a folder; in the scope, an OSError becomes a TrainingError that names `argument`."""
    try:
        with os_errors(folder):
            tf.io.gfile.makedirs(folder)
        yield
    except OSError as error:
        raise TrainingError(
            f"{argument} must be a folder that this process can write to, got {folder!r}:"
            f" {error.strerror}. Correct its permissions, free disk space, or use another folder."
        ) from error


def check_writable(folder: str, argument: str) -> None:
    """Creates a folder if it is missing, and a file in it that is removed again.

    Raises:
        TrainingError: this process cannot write there.
    """
    with error_if_unwritable(folder, argument):
        probe = posixpath.join(folder, f".probe-{os.getpid()}")
        write_text(probe, " ", unfinished=f"{probe}.unfinished")
        remove(probe)


def names_in(folder: str) -> list[str]:
    """Returns the sorted names in a folder; an empty list if there is no such folder."""
    with contextlib.suppress(FileNotFoundError), os_errors(folder):
        return sorted(name.rstrip("/") for name in tf.io.gfile.listdir(folder))
    return []


def remove(path: str) -> None:
    """Removes a file, if it exists."""
    with contextlib.suppress(FileNotFoundError), os_errors(path):
        tf.io.gfile.remove(path)


def rename(path: str, new: str) -> None:
    """Renames a file; a file of the new name is replaced."""
    with os_errors(path):
        tf.io.gfile.rename(path, new, overwrite=True)
    _sync(os.path.dirname(new) or ".")


def open_file(path: str, mode: str) -> Any:
    """Opens a file in a binary mode.

    Local files are opened by Python, which writes arrays without a copy.
    """
    return tf.io.gfile.GFile(path, mode) if _is_remote(path) else open(path, mode)


@contextlib.contextmanager
def atomic_write(
    path: str, unfinished: str, before_rename: Callable[[], object] = lambda: None
) -> Iterator[Callable[[memoryview], None]]:
    """Scope of a new file; yields `write(data)`.

    At the end of the scope the data is on disk, and only then has the file its name. An error
    removes it. A crash leaves `unfinished`, and the file that was there before.
    """
    try:
        with os_errors(path):
            file = open_file(unfinished, "wb")
        with contextlib.closing(_Writer(file, unfinished)) as writer:
            yield writer.write
        before_rename()
        rename(unfinished, path)
    except BaseException:
        with contextlib.suppress(OSError):  # the first error is the one to report
            remove(unfinished)
        raise


def write_text(path: str, text: str, unfinished: str) -> None:
    """Writes a small file atomically."""
    with atomic_write(path, unfinished) as write:
        write(memoryview(text.encode()))


class _Writer:
    """Writes a file to disk in pieces, and takes the pieces out of the page cache.

    The kernel reuses those pages. On a virtual machine, new pages cost 2.5 s of a processor for
    1 GB, and reused ones 0.3 s.
    """

    def __init__(self, file: Any, path: str):
        self._file = file
        self._path = path
        self._unsynced = 0

    def write(self, data: memoryview) -> None:
        with os_errors(self._path):
            if _is_remote(self._path):
                self._file.write(data.tobytes())
                return
            for start in range(0, len(data), SYNC_BYTES):
                piece = data[start : start + SYNC_BYTES]
                self._file.write(piece)
                self._unsynced += len(piece)
                if self._unsynced >= SYNC_BYTES:
                    self._sync_file()

    def close(self) -> None:
        with os_errors(self._path):
            try:
                if not _is_remote(self._path):
                    self._sync_file()
            finally:
                self._file.close()

    def _sync_file(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        self._unsynced = 0


SYNC_BYTES = 16 * 2**20


def _is_remote(path: str) -> bool:
    return "://" in path


def _sync(folder: str) -> None:
    """Waits until the names in a local folder are on disk."""
    if _is_remote(folder):
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
