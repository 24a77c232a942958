"""Files that are there as a whole, or not at all: of this machine, or of a remote store.

A remote store (`gs://`, `hdfs://`, ...) is what `tf.io.gfile` opens. It has no hard links and no
files that are written in place: HDF5 writes beside, on this machine, and the file is copied.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TypeAlias

import tensorflow as tf

from tfdist_ext.errors import TrainingError

__all__ = [
    "AnyPath",
    "RemotePath",
    "atomic_write",
    "check_writable",
    "checkpoint_folder",
    "create_exclusively",
    "files_in",
    "moved_if_free",
    "naming_unwritable",
    "on_disk",
    "path_of",
    "to_disk",
    "written_here",
]


class RemotePath(os.PathLike[str]):
    """A path of a file system that TensorFlow knows by its scheme, with pathlib's names.

    What fails is an OSError, as with pathlib.
    """

    def __init__(self, address: str):
        self._address = address.rstrip("/")

    def __fspath__(self) -> str:
        return self._address

    __str__ = __fspath__

    def __repr__(self) -> str:
        return f"RemotePath({self._address!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and other._address == self._address

    def __hash__(self) -> int:
        return hash(self._address)

    def __truediv__(self, name: str | os.PathLike[str]) -> RemotePath:
        return RemotePath(f"{self._address}/{os.fspath(name)}")

    @property
    def name(self) -> str:
        return self._address.rpartition("/")[2]

    @property
    def stem(self) -> str:
        return Path(self.name).stem

    @property
    def parent(self) -> RemotePath:
        return RemotePath(self._address.rpartition("/")[0])

    def with_name(self, name: str) -> RemotePath:
        return self.parent / name

    def with_stem(self, stem: str) -> RemotePath:
        return self.parent / Path(self.name).with_stem(stem).name

    def absolute(self) -> RemotePath:
        return self

    def exists(self) -> bool:
        with _os_errors(self):
            return bool(tf.io.gfile.exists(self._address))

    def is_dir(self) -> bool:
        with _os_errors(self):
            return bool(tf.io.gfile.isdir(self._address))

    def mkdir(self, parents: bool = True, exist_ok: bool = True) -> None:
        """Create it, and what it is in."""
        with _os_errors(self):
            tf.io.gfile.makedirs(self._address)

    def iterdir(self) -> Iterator[RemotePath]:
        with _os_errors(self):
            names = tf.io.gfile.listdir(self._address)
        return (self / name.rstrip("/") for name in names)

    def read_text(self, encoding: str = "utf-8") -> str:
        with _os_errors(self), tf.io.gfile.GFile(self._address, "rb") as file:
            return bytes(file.read()).decode(encoding)

    def write_text(self, text: str, encoding: str = "utf-8") -> None:
        with _os_errors(self), tf.io.gfile.GFile(self._address, "wb") as file:
            file.write(text.encode(encoding))

    def unlink(self, missing_ok: bool = False) -> None:
        absent = contextlib.suppress(FileNotFoundError) if missing_ok else contextlib.nullcontext()
        with absent, _os_errors(self):
            tf.io.gfile.remove(self._address)

    def replace(self, target: AnyPath) -> None:
        with _os_errors(self):
            tf.io.gfile.rename(self._address, os.fspath(target), overwrite=True)

    def stat(self) -> SimpleNamespace:
        """Its `st_mtime`, in seconds since 1970; 0 where the store does not know."""
        with _os_errors(self):
            return SimpleNamespace(st_mtime=tf.io.gfile.stat(self._address).mtime_nsec / 1e9)


AnyPath: TypeAlias = Path | RemotePath


@contextlib.contextmanager
def _os_errors(path: RemotePath) -> Iterator[None]:
    try:
        yield
    except tf.errors.NotFoundError as error:
        raise FileNotFoundError(None, error.message, str(path)) from error
    except tf.errors.OpError as error:
        raise OSError(None, error.message, str(path)) from error


def path_of(path: str | os.PathLike[str]) -> AnyPath:
    """A path of this machine, or one of a remote store (`gs://bucket/folder`)."""
    address = os.fspath(path)
    return RemotePath(address) if "://" in address else Path(path)


def files_in(folder: AnyPath) -> list[AnyPath]:
    """What is in a folder, by name; nothing where there is none."""
    found: list[AnyPath] = []
    with contextlib.suppress(FileNotFoundError):
        found += folder.iterdir()
    return sorted(found, key=lambda path: path.name)


def checkpoint_folder(checkpoint_dir: str | os.PathLike[str]) -> AnyPath:
    """The folder that `fit(checkpoint_dir=...)` names.

    Raises:
        TrainingError: anything but a path, or an empty one.
    """
    got = f"got {checkpoint_dir!r}"
    if not isinstance(checkpoint_dir, str | os.PathLike) or not str(checkpoint_dir).strip():
        raise TrainingError(
            f"checkpoint_dir must be the path of a folder, {got}: give None for no checkpoints, or"
            ' "." for the working folder.'
        )
    if "\0" in str(checkpoint_dir):
        raise TrainingError(f"checkpoint_dir must be a path without null characters, {got}.")
    return path_of(os.fspath(checkpoint_dir))


def check_writable(folder: AnyPath, argument: str) -> None:
    """Create a folder if missing, and a file in it that is removed again.

    Raises:
        TrainingError: this process cannot write there.
    """
    with naming_unwritable(folder, argument):
        folder.mkdir(parents=True, exist_ok=True)
        create_exclusively(probe := folder / ".probe.json", " ", name=uuid.uuid4().hex)
        probe.unlink(missing_ok=True)


@contextlib.contextmanager
def naming_unwritable(folder: AnyPath, argument: str) -> Iterator[None]:
    """Scope whose files cannot be written because the folder is not a good one.

    Args:
        argument: that names the folder, for the message.

    Raises:
        TrainingError: in place of an OSError.
    """
    try:
        yield
    except OSError as error:
        reason = f"{type(error).__name__}: {error.strerror}"
        if isinstance(error, FileExistsError):
            reason = "there is a file of that name"
        raise TrainingError(
            f"{argument} must be a folder that this process can write to, got {str(folder)!r}:"
            f" {reason}. Correct its permissions, free disk space,"
            " or give another folder."
        ) from error


@contextlib.contextmanager
def atomic_write(path: AnyPath) -> Iterator[AnyPath]:
    """A path to write to; what is there takes the place of `path` at once, and only when complete.

    A crash leaves the old file as it was, and what was written of the new one as `.*.unfinished`;
    the next file of that name is written over it.
    """
    with on_disk(path.with_name(f".{path.name}.unfinished")) as unfinished:
        yield unfinished
        to_disk(unfinished)
        unfinished.replace(path)


@contextlib.contextmanager
def written_here(path: AnyPath) -> Iterator[Path]:
    """A file of this machine to write to, which is copied to where the path says."""
    if isinstance(path, Path):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="tfdist-checkpoint-") as folder:
        yield (here := Path(folder) / path.name)
        with _os_errors(path):
            tf.io.gfile.copy(str(here), str(path), overwrite=True)


@contextlib.contextmanager
def on_disk(unfinished: AnyPath) -> Iterator[AnyPath]:
    """A file to write and to rename, which is removed if that fails."""
    try:
        yield unfinished
    except BaseException:
        with contextlib.suppress(OSError):  # the first error is the one to be seen
            unfinished.unlink(missing_ok=True)
        raise
    to_disk(unfinished.parent)  # the new name itself


def moved_if_free(unfinished: AnyPath, path: AnyPath) -> bool:
    """Rename a file, unless there is one of that name already; whether it was done.

    Also False where a mounted file system has no hard links: nothing else renames so at once.
    """
    if isinstance(unfinished, RemotePath):
        with _os_errors(unfinished):
            try:
                tf.io.gfile.rename(str(unfinished), str(path))
            except tf.errors.AlreadyExistsError:
                return False
        return True
    try:
        os.link(unfinished, path)
    except OSError:
        # The answer of a network file system may be lost, and the call be made twice.
        try:
            if not unfinished.samefile(str(path)):
                return False
        except FileNotFoundError:  # of another job, which has removed it meanwhile
            return False
    unfinished.unlink(missing_ok=True)
    return True


def create_exclusively(path: AnyPath, text: str, *, name: str) -> bool:
    """Create a file, unless there is one; of several processes that try, one gets True.

    Args:
        name: of this process and call alone.
    """
    with on_disk(path.with_name(f".{path.name}.{name}.unfinished")) as unfinished:
        _write(unfinished, text)
        if moved_if_free(unfinished, path):
            return True
        unfinished.unlink(missing_ok=True)
        if isinstance(path, RemotePath):
            return False
        try:
            _write(path, text)  # where there are no hard links
        except FileExistsError:
            return False
    return True


def _write(path: AnyPath, text: str) -> None:
    if isinstance(path, RemotePath):
        path.write_text(text)
        return
    with open(path, "x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())  # by its number, as another job may have removed the name


def to_disk(path: AnyPath) -> None:
    """Wait until a file, or the names in a folder, would be there after a power cut.

    What a remote store has, it keeps.
    """
    if isinstance(path, RemotePath):
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
