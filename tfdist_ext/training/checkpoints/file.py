"""One checkpoint in one file: HDF5, whole values by name, no trace of the strategy.

The file appears under its name when it is complete, or not at all.

    /                attributes: format, version, epoch, step, ...
    /<group>         model, metrics, and one for each optimizer; attributes: what it belongs to
    /<group>/<n>     one variable; attributes: its name, its path in Keras, its dtype, its crc32

`crc32` is that of the variable's bytes in the order of its rows. Of all else HDF5 has checksums
of its own. So no byte goes unnoticed that changes what is restored. Files of version 1 have
neither.

The whole value of a Keras variable, whatever lies behind it: copies, pieces, a remote server.

A mirrored variable has a copy on each replica, a partitioned one has pieces of its rows on
several parameter servers. Both are read and written in blocks of rows, so that a table that needs
several servers never has to fit into this process.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py  # type: ignore[import-untyped]
import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tfdist_ext.errors import TrainingError
from tfdist_ext.strategies import StrategyTemplate
from tfdist_ext.training import _keras_private as kp
from tfdist_ext.training.checkpoints.atomic_write import (
    AnyPath,
    RemotePath,
    atomic_write,
    files_in,
    written_here,
)

__all__ = [
    "BLOCK_BYTES",
    "CheckpointFile",
    "Copied",
    "CopiesInMemory",
    "DamagedCheckpointError",
    "Saved",
    "assign_rows",
    "assign_whole",
    "blocks",
    "blocks_of",
    "read_rows",
    "whole_value",
    "write_checkpoint",
]


_FORMAT = "tfdist_ext checkpoint"


_VERSION = 2


_DAMAGED = "It is damaged; use another checkpoint."


@dataclass(frozen=True)
class Saved:
    """A variable in a checkpoint.

    Attributes:
        name: the same in every job.
        path: Keras's name of it in the job that saved it.
        shape: of the whole variable.
        dtype: its name, such as "float32".
        crc: the checksum of its values; None in a file of version 1.
        values: the dataset in the file, while that is open.
    """

    name: str
    path: str
    shape: tuple[int, ...]
    dtype: str
    crc: int | None
    values: h5py.Dataset


@dataclass(frozen=True)
class Copied:
    """The value of a Keras variable as it was.

    Attributes:
        path: Keras's name of it.
        dtype: of its values.
        value: the whole of it.
    """

    path: str
    dtype: tf.DType
    value: np.ndarray


class CopiesInMemory:
    """Copies of variables in memory of this process, which is kept for the next copies."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str], np.ndarray] = {}

    def of(
        self, groups: Mapping[str, Mapping[str, keras.Variable]]
    ) -> dict[str, dict[str, Copied]]:
        """Group -> name -> the variable's value; the copies before are overwritten."""
        return {
            group: {name: self._copied(group, name, each) for name, each in variables.items()}
            for group, variables in groups.items()
        }

    def _copied(self, group: str, name: str, variable: keras.Variable) -> Copied:
        value = _without_copy(variable)
        kept = self._kept.get((group, name))
        if kept is None or (kept.shape, kept.dtype) != (value.shape, value.dtype):
            kept = self._kept[group, name] = np.empty(value.shape, value.dtype)
        np.copyto(kept, value)
        return Copied(variable.path, kp.raw_value(variable).dtype, kept)


def _without_copy(variable: keras.Variable) -> np.ndarray:
    """The value, where it lies, if that is in memory of this process; else a copy."""
    pieces = [copies for _, _, copies in _pieces(variable)]
    strategy = getattr(kp.raw_value(variable), "distribute_strategy", None)
    own = isinstance(strategy, StrategyTemplate) and strategy.has_own_reading
    if len(pieces) == 1 and not own and "CPU" in pieces[0][0].device:
        with contextlib.suppress(TypeError, ValueError, BufferError):  # of dtypes that are ours
            return np.asarray(memoryview(pieces[0][0].read_value()))
    return whole_value(variable)


def write_checkpoint(
    path: AnyPath,
    groups: Mapping[str, Mapping[str, keras.Variable | Copied]],
    kinds: Mapping[str, str],
    attributes: Mapping[str, int | str],
    place: Callable[[AnyPath], contextlib.AbstractContextManager[AnyPath]] = atomic_write,
    arrays: Mapping[str, Mapping[str, np.ndarray]] | None = None,
    wrote: Callable[[], object] = lambda: None,
) -> None:
    """Write variables, a block of rows at a time, and arrays.

    Args:
        path: the file; its folder is created if missing.
        groups: group -> name -> Keras variable, or its copy.
        kinds: group -> what must be the same where it is restored, such as the optimizer's class.
        attributes: of the file, such as the epoch.
        place: gives the file to write to, and puts it where it belongs when it is complete.
        arrays: group -> name -> array, of what is no variable.
        wrote: called after each block.

    Raises:
        TrainingError: `path` is a folder.
        OSError: the file cannot be written.
    """
    if path.is_dir():
        raise TrainingError(f"a checkpoint must be a file, got the folder {path}: add a file name.")
    path.parent.mkdir(parents=True, exist_ok=True)
    fixed = {k: _as_bytes(v) if isinstance(v, str) else v for k, v in attributes.items()}
    with (
        place(path) as unfinished,
        written_here(unfinished) as here,
        _Sink(here) as sink,
        _open(sink, "w") as file,
    ):
        file.attrs.update({"format": _as_bytes(_FORMAT), "version": _VERSION, **fixed})
        for name, variables in groups.items():
            group = file.create_group(name)
            if kind := kinds.get(name, ""):
                group.attrs["kind"] = _as_bytes(kind)
            for number, (key, variable) in enumerate(variables.items()):
                if isinstance(variable, Copied):
                    shape, dtype, rows = variable.value.shape, variable.dtype, _rows(variable.value)
                else:
                    shape, dtype = tuple(variable.shape), kp.raw_value(variable).dtype
                    rows = (read_rows(variable, start, stop) for start, stop in blocks(variable))
                _write(group, str(number), key, variable.path, shape, dtype, rows, wrote)
        for name, named in (arrays or {}).items():
            group = file.create_group(name)
            for number, (key, array) in enumerate(named.items()):
                dtype = tf.as_dtype(array.dtype)
                _write(group, str(number), key, key, array.shape, dtype, _rows(array), wrote)


def _rows(array: np.ndarray) -> Iterator[np.ndarray]:
    rows = np.atleast_1d(array)
    return (rows[start:stop] for start, stop in blocks_of(array.shape, array.dtype.itemsize))


# After so many bytes they go to the disk, and leave the page cache. Its pages are used again then:
# new ones cost the training, on a virtual machine, 2.5 s of a processor for 1 GB, these 0.3 s.
_SYNC_BYTES = 16 * 2**20


class _Sink(io.FileIO):
    """A new file that HDF5 writes to; what fails is raised when it is closed.

    Of a write that fails, as on a full disk, HDF5 must not know: it keeps the file then, complains
    about each object in it, and may end the process with a segmentation fault.
    """

    def __init__(self, path: Path):
        super().__init__(path, "w+")
        self._error: OSError | None = None
        self._unsynced = 0

    def write(self, data: Any) -> int:
        left = memoryview(data).cast("B")
        size = len(left)
        try:
            while left and self._error is None:
                wrote = super().write(left[:_SYNC_BYTES])
                left = left[wrote:]
                self._unsynced += wrote
                if self._unsynced >= _SYNC_BYTES:
                    self._sync()
        except OSError as error:
            self._error = error
        return size

    def _sync(self) -> None:
        os.fsync(self.fileno())
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        self._unsynced = 0

    def truncate(self, size: int | None = None) -> int:
        try:
            return super().truncate(size)
        except OSError as error:
            self._error = self._error or error
            return size or 0

    def __exit__(self, *_: object) -> None:
        self.close()
        if self._error is not None:
            self._error.filename = self.name
            raise self._error


class DamagedCheckpointError(TrainingError):
    """The file can be read, but its bytes are not those of a complete checkpoint."""


class CheckpointFile(contextlib.AbstractContextManager["CheckpointFile"]):
    """A checkpoint to read from.

    Raises:
        TrainingError: there is no such file, it is no checkpoint, is cut off, is damaged in
            another place than a variable's values, or was written by a newer version of this
            package.
    """

    def __init__(self, path: AnyPath):
        self._path = path
        if path.is_dir():
            raise TrainingError(f"a checkpoint must be a file, got the folder {path}.{_in(path)}")
        if not path.exists():
            raise TrainingError(f"there is no checkpoint {path}.{_in(path.parent)}")
        try:
            self._file = _open(path, "r")
        except OSError as error:
            # HDF5's own errors have no number: the system could read the file.
            kind = TrainingError if error.errno else DamagedCheckpointError
            raise kind(
                f"{path} must be a complete checkpoint that save_checkpoint() has written, got a"
                f" file that cannot be opened ({error}): copy it again, or use another checkpoint."
            ) from error
        try:
            self._version = self._checked_version()
            with self._readable():
                # By name: of what cannot be read, h5py's items(), get() and `in` do not say why, or
                # that it is not there.
                groups = {name: self._file[name] for name in self._file}
                self._kinds = {name: _text(g.attrs.get("kind", "")) for name, g in groups.items()}
                self._variables = {
                    name: [self._saved(group[place]) for place in group]
                    for name, group in groups.items()
                }
        except TrainingError:
            self._file.close()
            raise

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def number(self, name: str) -> int:
        """An attribute of the file; 0 where an older version did not write it."""
        with self._readable():
            return int(self._file.attrs.get(name, 0))

    def text(self, name: str) -> str:
        """An attribute that is a text; empty where an older version did not write it."""
        with self._readable():
            return _text(self._file.attrs.get(name, ""))

    def kind(self, group: str) -> str | None:
        """The class that a group belongs to; None where the checkpoint has no such group."""
        return self._kinds.get(group)

    def variables(self, group: str) -> dict[str, Saved]:
        """name -> variable."""
        return {saved.name: saved for saved in self._variables.get(group, [])}

    def rows(self, saved: Saved, start: int, stop: int) -> np.ndarray:
        """Rows of a saved variable; of a scalar, an array of one value.

        Raises:
            TrainingError: the file cannot be read.
        """
        stored = self._stored_rows(saved, start, stop)
        held = np.dtype(tf.as_dtype(saved.dtype).as_numpy_dtype)
        return stored.view(held) if _stored_as_bits(held) else stored

    def arrays(self, group: str) -> dict[str, np.ndarray]:
        """name -> array, of a group of arrays; empty where there is none."""
        return {
            name: self.rows(saved, 0, (saved.shape or (1,))[0]).reshape(saved.shape)
            for name, saved in self.variables(group).items()
        }

    def verify(self) -> None:
        """Read every value once, a block of rows at a time, and compare the checksums.

        Raises:
            TrainingError: names the variable that is damaged.
        """
        for saved in itertools.chain(*self._variables.values()):
            crc = 0
            for start, stop in blocks_of(saved.shape, tf.as_dtype(saved.dtype).size):
                crc = _crc_of(self._stored_rows(saved, start, stop), crc)
            if saved.crc not in (None, crc):
                raise DamagedCheckpointError(
                    f"the values of {saved.path!r} in {self._path} must have the checksum that was"
                    f" written with them, got another one. {_DAMAGED}"
                )

    def _checked_version(self) -> int:
        with self._readable():
            written_by = _text(self._file.attrs.get("format"))
        if written_by != _FORMAT:
            raise DamagedCheckpointError(
                f"{self._path} must be a checkpoint of save_checkpoint(), got another HDF5 file."
                " Weights that Keras saved are loaded with keras_model.load_weights()."
            )
        version = self.number("version")
        if version > _VERSION:
            raise TrainingError(
                f"{self._path} must be a checkpoint of version {_VERSION} or earlier, got version"
                f" {version}: install a newer version of this package."
            )
        return version

    def _saved(self, dataset: h5py.Dataset) -> Saved:
        attributes = dict(dataset.attrs)
        return Saved(
            name=_text(attributes["name"]),
            path=_text(attributes["path"]),
            shape=tuple(dataset.shape),
            dtype=_text(attributes["dtype"]),
            crc=int(attributes["crc32"]) if self._version > 1 else None,
            values=dataset,
        )

    def _stored_rows(self, saved: Saved, start: int, stop: int) -> np.ndarray:
        with self._readable(f"{saved.path!r} in "):
            if saved.shape:
                return saved.values[start:stop]
            return saved.values[()].reshape(1)

    @contextlib.contextmanager
    def _readable(self, part: str = "") -> Iterator[None]:
        try:
            yield
        except Exception as error:  # h5py comes upon anything in broken bytes
            system = isinstance(error, tf.errors.OpError) or getattr(error, "errno", None)
            kind = TrainingError if system else DamagedCheckpointError
            raise kind(f"{part}{self._path} cannot be read: {error} {_DAMAGED}") from error


def _in(folder: AnyPath) -> str:
    names = [path.name for path in files_in(folder)]
    return f" The folder has: {', '.join(names[:8])}." if names else " The folder has no files."


def _open(path: AnyPath | _Sink, mode: str) -> h5py.File:
    # Files are written under a name of their own and never changed; shared disks may have no locks.
    # From its version 1.8 on, HDF5 has checksums of its own structures: without them a damaged file
    # may end the process.
    source = tf.io.gfile.GFile(str(path), "rb") if isinstance(path, RemotePath) else path
    return h5py.File(source, mode, locking=False, libver=("v108", "latest"))


def _write(
    group: h5py.Group,
    place: str,
    key: str,
    path: str,
    shape: tuple[int, ...],
    dtype: tf.DType,
    blocks_of_rows: Iterable[np.ndarray],
    wrote: Callable[[], object],
) -> None:
    held = np.dtype(dtype.as_numpy_dtype)
    stored = f"u{held.itemsize}" if _stored_as_bits(held) else held
    dataset, crc, start = group.create_dataset(place, shape, stored), 0, 0
    for block in blocks_of_rows:
        rows = block.view(stored)
        dataset[slice(start, start + len(rows)) if shape else ...] = rows if shape else rows[0]
        crc = _crc_of(rows, crc)
        start += len(rows)
        wrote()
    for name, text in {"name": key, "path": path, "dtype": dtype.name}.items():
        dataset.attrs[name] = _as_bytes(text)
    dataset.attrs["crc32"] = crc


def _crc_of(rows: np.ndarray, before: int) -> int:
    """The checksum of these rows, as they are stored, and of those before them."""
    return zlib.crc32(np.ascontiguousarray(rows).data, before)


def _stored_as_bits(dtype: np.dtype) -> bool:
    """HDF5 has no bfloat16 or 8-bit floats: they are stored as integers of the same bits."""
    return dtype.kind == "V"


def _as_bytes(text: str) -> np.bytes_:
    # Of a fixed length. HDF5 keeps others in a heap without checksums, and where that is damaged it
    # may read forever.
    return np.bytes_(text.encode())


def _text(attribute: bytes | str) -> str:
    return attribute.decode() if isinstance(attribute, bytes) else str(attribute)


BLOCK_BYTES = 64 * 2**20


def whole_value(variable: keras.Variable) -> np.ndarray:
    """The value of a Keras variable: of its first copy here, its pieces put together.

    Where the strategy reads variables in a way of its own, what it reads.
    """
    shape = tuple(variable.shape)
    ranges = list(blocks(variable))
    if len(ranges) == 1:
        return read_rows(variable, *ranges[0]).reshape(shape)
    whole = np.empty(shape, kp.raw_value(variable).dtype.as_numpy_dtype)
    for start, stop in ranges:
        whole[start:stop] = read_rows(variable, start, stop)
    return whole


def assign_whole(variable: keras.Variable, value: npt.ArrayLike) -> None:
    """Give a Keras variable a value, on every copy here and on every piece.

    Raises:
        ValueError: `value` has another shape.
    """
    value = np.asarray(value)
    if value.shape != tuple(variable.shape):
        raise ValueError(
            f"the value of {variable.path!r} must have shape {tuple(variable.shape)}, got"
            f" {value.shape}."
        )
    rows = np.atleast_1d(value)
    for start, stop in blocks(variable):
        assign_rows(variable, start, rows[start:stop])


def blocks(variable: keras.Variable | tf.Variable) -> Iterator[tuple[int, int]]:
    """The ranges of rows in which a Keras variable is read and written: `blocks_of` its value."""
    return blocks_of(tuple(variable.shape), kp.raw_value(variable).dtype.size)


def blocks_of(shape: tuple[int, ...], item_bytes: int) -> Iterator[tuple[int, int]]:
    """(first row, row after the last) of ranges of rows that are no bigger than BLOCK_BYTES.

    A scalar counts as one row. A range has one row at least, however big it is.
    """
    rows, *rest = shape or (1,)
    row_bytes = int(np.prod(rest, dtype=np.int64)) * item_bytes
    step = max(1, BLOCK_BYTES // max(1, row_bytes))
    for start in range(0, rows, step):
        yield start, min(rows, start + step)


def read_rows(variable: keras.Variable | tf.Variable, start: int, stop: int) -> np.ndarray:
    """The rows from `start` up to `stop`; of a scalar, an array of one value."""
    raw = kp.raw_value(variable)
    strategy = getattr(raw, "distribute_strategy", None)
    if isinstance(strategy, StrategyTemplate) and strategy.has_own_reading:
        return np.atleast_1d(raw.numpy())[start:stop]
    parts = []
    for first, rows, copies in _pieces(variable):
        low, high = max(start - first, 0), min(stop - first, rows)
        if (low, high) == (0, rows):
            parts.append(np.atleast_1d(copies[0].numpy()))
        elif low < high:
            copy = copies[0]
            # A gather runs where the variable is: only these rows are moved.
            taken = tf.raw_ops.ResourceGather(
                resource=copy.handle, indices=tf.range(low, high), dtype=copy.dtype
            )
            parts.append(taken.numpy())
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def assign_rows(variable: keras.Variable | tf.Variable, start: int, values: np.ndarray) -> None:
    """Give the rows from `start` on new values, on every copy here and on every piece."""
    for first, rows, copies in _pieces(variable):
        low, high = max(start - first, 0), min(start + len(values) - first, rows)
        if low >= high:
            continue
        part = tf.constant(values[low + first - start : high + first - start], copies[0].dtype)
        for copy in copies:
            if (low, high) == (0, rows):
                copy.assign(tf.reshape(part, copy.shape))
            else:
                tf.raw_ops.ResourceScatterUpdate(
                    resource=copy.handle, indices=tf.range(low, high), updates=part
                )


def _pieces(
    variable: keras.Variable | tf.Variable,
) -> Iterator[tuple[int, int, Sequence[tf.Variable]]]:
    """(first row, rows, the plain variables that are its copies here) of each piece."""
    raw = kp.raw_value(variable)
    first = 0
    for piece in getattr(raw, "variables", [raw]):  # those of a partitioned variable
        rows = piece.shape[0] if piece.shape.rank else 1
        yield first, rows, _copies(piece)
        first += rows


def _copies(piece: tf.Variable) -> list[tf.Variable]:
    strategy = getattr(piece, "distribute_strategy", None)
    copies = [piece] if strategy is None else strategy.experimental_local_results(piece)
    return [_unwrapped(copy) for copy in copies]


def _unwrapped(variable: tf.Variable) -> tf.Variable:
    # Central storage and parameter servers wrap their variables to aggregate, or to cache.
    while hasattr(variable, "get"):
        variable = variable.get()
    return variable
