"""Files on a file system of this machine that are there as a whole, or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from tfdist_ext.errors import TrainingError

__all__ = ["local_path", "replaced_when_complete"]


def local_path(path: str | Path) -> Path:
    """The path, which is to be one of a mounted file system.

    Raises:
        TrainingError: the address of an object store, which would become a folder named `gs:`.
    """
    if "://" in str(path):
        raise TrainingError(
            f"checkpoints are files of a mounted file system, and {path} is the address of a"
            " remote store: mount it and give the path there, or save to a disk and copy the file."
        )
    return Path(path)


@contextlib.contextmanager
def replaced_when_complete(path: Path) -> Iterator[Path]:
    """A path to write to; what is there takes the place of `path` at once, and only when complete.

    A crash leaves the old file as it was, and what was written of the new one as `.*.unfinished`;
    the next file of that name is written over it.
    """
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        yield unfinished
        with open(unfinished, "rb") as file:
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the new name itself
    finally:
        os.close(folder)
