"""Files on a file system of this machine that are there as a whole, or not at all."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

from tfdist_ext.errors import TrainingError

__all__ = [
    "atomic_write",
    "check_writable",
    "checkpoint_folder",
    "create_exclusively",
    "local_path",
    "moved_if_free",
    "naming_unwritable",
    "on_disk",
    "to_disk",
]


def local_path(path: str | Path) -> Path:
    """The path, which is to be one of a mounted file system.

    Raises:
        TrainingError: the address of an object store, which would become a folder named `gs:`.
    """
    if "://" in str(path):
        raise TrainingError(
            f"a checkpoint must be a file of a mounted file system, got {path}, the address of a"
            " remote store: mount it and give the path there, or save to a disk and copy the file."
        )
    return Path(path)


def checkpoint_folder(checkpoint_dir: str | os.PathLike[str]) -> Path:
    """The folder that `fit(checkpoint_dir=...)` names.

    Raises:
        TrainingError: anything but a path, an empty one, or the address of an object store.
    """
    got = f"got {checkpoint_dir!r}"
    if not isinstance(checkpoint_dir, str | os.PathLike) or not str(checkpoint_dir).strip():
        raise TrainingError(
            f"checkpoint_dir must be the path of a folder, {got}: give None for no checkpoints, or"
            ' "." for the working folder.'
        )
    if "\0" in str(checkpoint_dir):
        raise TrainingError(f"checkpoint_dir must be a path without null characters, {got}.")
    return local_path(os.fspath(checkpoint_dir))


def check_writable(folder: Path, argument: str) -> None:
    """Create a folder if missing, and a file in it that is removed again.

    Raises:
        TrainingError: this process cannot write there.
    """
    with naming_unwritable(folder, argument):
        folder.mkdir(parents=True, exist_ok=True)
        create_exclusively(probe := folder / ".probe.json", " ", name=uuid.uuid4().hex)
        probe.unlink(missing_ok=True)


@contextlib.contextmanager
def naming_unwritable(folder: Path, argument: str) -> Iterator[None]:
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
def atomic_write(path: Path) -> Iterator[Path]:
    """A path to write to; what is there takes the place of `path` at once, and only when complete.

    A crash leaves the old file as it was, and what was written of the new one as `.*.unfinished`;
    the next file of that name is written over it.
    """
    with on_disk(path.with_name(f".{path.name}.unfinished")) as unfinished:
        yield unfinished
        to_disk(unfinished)
        os.replace(unfinished, path)


@contextlib.contextmanager
def on_disk(unfinished: Path) -> Iterator[Path]:
    """A file to write and to rename, which is removed if that fails."""
    try:
        yield unfinished
    except BaseException:
        with contextlib.suppress(OSError):  # the first error is the one to be seen
            unfinished.unlink(missing_ok=True)
        raise
    to_disk(unfinished.parent)  # the new name itself


def moved_if_free(unfinished: Path, path: Path) -> bool:
    """Rename a file, unless there is one of that name already; whether it was done.

    Also False where the file system has no hard links: nothing else renames so at once.
    """
    try:
        os.link(unfinished, path)
    except OSError:
        # The answer of a network file system may be lost, and the call be made twice.
        try:
            if not unfinished.samefile(path):
                return False
        except FileNotFoundError:  # of another job, which has removed it meanwhile
            return False
    unfinished.unlink(missing_ok=True)
    return True


def create_exclusively(path: Path, text: str, *, name: str) -> bool:
    """Create a file, unless there is one; of several processes that try, one gets True.

    Args:
        name: of this process and call alone.
    """
    with on_disk(path.with_name(f".{path.name}.{name}.unfinished")) as unfinished:
        _write(unfinished, text)
        if moved_if_free(unfinished, path):
            return True
        unfinished.unlink(missing_ok=True)
        try:
            _write(path, text)  # where there are no hard links
        except FileExistsError:
            return False
    return True


def _write(path: Path, text: str) -> None:
    with open(path, "x", encoding="utf-8") as file:
        file.write(text)
    to_disk(path)


def to_disk(path: Path) -> None:
    """Wait until a file, or the names in a folder, would be there after a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
