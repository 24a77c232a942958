"""One checkpoint in one file: HDF5, whole values by name, no trace of the strategy.

The file appears under its name when it is complete, or not at all.

    /                attributes: format, version, epoch, step, ...
    /<group>         model, metrics, and one for each optimizer; attributes: what it belongs to
    /<group>/<n>     one variable; attributes: its name, its path in Keras, its dtype
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py  # type: ignore[import-untyped]
import numpy as np

from tfdist_ext.errors import TrainingError
from tfdist_ext.training.saving.whole_values import blocks, read_rows

__all__ = ["CheckpointFile", "Saved", "replaced_when_complete", "write_checkpoint"]

_FORMAT = "tfdist_ext checkpoint"
_VERSION = 1


@dataclass(frozen=True)
class Saved:
    """A variable in a checkpoint."""

    path: str  # as Keras called it in the job that saved it
    shape: tuple[int, ...]
    dtype: str
    place: str  # of its dataset in the file


def write_checkpoint(
    path: Path,
    groups: Mapping[str, Mapping[str, Any]],
    kinds: Mapping[str, str],
    numbers: Mapping[str, int],
) -> None:
    """Write variables, a block of rows at a time.

    Args:
        path: of the file; its folder is made where there is none.
        groups: group -> name -> Keras variable.
        kinds: group -> what must be the same where it is restored, such as the optimizer's class.
        numbers: attributes of the file, such as the epoch.

    Raises:
        TrainingError: `path` is a folder.
    """
    if path.is_dir():
        raise TrainingError(f"a checkpoint is one file, and {path} is a folder: add a file name.")
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced_when_complete(path) as unfinished, _open(unfinished, "w") as file:
        file.attrs.update({"format": _FORMAT, "version": _VERSION, **numbers})
        for name, variables in groups.items():
            group = file.create_group(name)
            group.attrs["kind"] = kinds.get(name, "")
            for number, (key, variable) in enumerate(variables.items()):
                _write_variable(group, str(number), key, variable)


@contextlib.contextmanager
def replaced_when_complete(path: Path) -> Iterator[Path]:
    """A path to write to; what is there takes the place of `path` at once, and only when complete.

    A crash leaves the old file as it was.
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


class CheckpointFile(contextlib.AbstractContextManager["CheckpointFile"]):
    """A checkpoint to read from.

    Raises:
        TrainingError: there is no such file, it is no checkpoint, is cut off, or was written by
            a newer version of this package.
    """

    def __init__(self, path: Path):
        self._path = path
        if path.is_dir():
            raise TrainingError(f"a checkpoint is one file, and {path} is a folder.{_in(path)}")
        if not path.exists():
            raise TrainingError(f"there is no checkpoint {path}.{_in(path.parent)}")
        try:
            self._file = _open(path, "r")
        except OSError as error:
            raise TrainingError(
                f"{path} is no checkpoint, or is cut off ({error}). Give a file that"
                " save_checkpoint() has written; a copy must be complete."
            ) from error
        with self._readable():
            written_by = self._file.attrs.get("format")
        if written_by != _FORMAT:
            self._file.close()
            raise TrainingError(
                f"{path} is an HDF5 file, and no checkpoint of save_checkpoint(). Weights that"
                " Keras saved are loaded with keras_model.load_weights()."
            )
        if self.number("version") > _VERSION:
            version = self.number("version")
            self._file.close()
            raise TrainingError(
                f"{path} is a checkpoint of version {version}; this package reads up to version"
                f" {_VERSION}. Install a newer one."
            )

    def __exit__(self, *_: Any) -> None:
        self._file.close()

    def number(self, name: str) -> int:
        """An attribute of the file."""
        with self._readable():
            return int(self._file.attrs[name])

    def kind(self, group: str) -> str | None:
        """What a group belongs to; None where the checkpoint has no such group."""
        with self._readable():
            return str(self._file[group].attrs["kind"]) if group in self._file else None

    def variables(self, group: str) -> dict[str, Saved]:
        """name -> variable."""
        with self._readable():
            return {
                str(dataset.attrs["name"]): Saved(
                    str(dataset.attrs["path"]),
                    tuple(dataset.shape),
                    str(dataset.attrs["dtype"]),
                    dataset.name,
                )
                for dataset in self._file.get(group, {}).values()
            }

    def rows(self, saved: Saved, start: int, stop: int) -> np.ndarray:
        """Rows of a saved variable; of a scalar, an array of one value.

        Raises:
            TrainingError: the file cannot be read.
        """
        with self._readable():
            dataset = self._file[saved.place]
            stored: np.ndarray = dataset[start:stop] if saved.shape else dataset[()].reshape(1)
        return stored

    @contextlib.contextmanager
    def _readable(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # h5py comes upon anything in broken bytes
            raise TrainingError(
                f"{self._path} cannot be read: {error} It is damaged; use another checkpoint."
            ) from error


def _in(folder: Path) -> str:
    names = sorted(path.name for path in folder.glob("*"))
    return f" The folder has: {', '.join(names[:8])}." if names else " The folder has no files."


def _open(path: Path, mode: str) -> Any:
    # Files are written under a name of their own and never changed; shared disks may have no locks.
    return h5py.File(path, mode, locking=False)


def _write_variable(group: Any, place: str, key: str, variable: Any) -> None:
    shape = tuple(variable.shape)
    dataset = None
    for start, stop in blocks(variable):
        rows = _as_stored(read_rows(variable, start, stop))
        if dataset is None:
            dataset = group.create_dataset(place, shape, rows.dtype)
        dataset[slice(start, stop) if shape else ...] = rows if shape else rows[0]
    if dataset is None:  # no rows
        dataset = group.create_dataset(place, shape, "float32")
    dataset.attrs.update({"name": key, "path": variable.path, "dtype": variable.dtype})


def _as_stored(values: np.ndarray) -> np.ndarray:
    """HDF5 has no bfloat16 or 8-bit floats: their bits are stored."""
    return values.view(f"u{values.dtype.itemsize}") if values.dtype.kind == "V" else values
