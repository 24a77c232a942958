"""Any records of any number of TFRecord files, by number.

    records = Records(files)
    len(records)                  # examples of all files
    records.read([5, 700, 6])     # their payloads

Bytes read are those of the records asked for; neighbors are read together.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from tfdist_ext.data.file_bytes import open_bytes
from tfdist_ext.data.record_format import HEADER, TAIL, is_record, payloads_of
from tfdist_ext.data.record_index import indexes_of
from tfdist_ext.errors import DataError
from tfdist_ext.messages import shown
from tfdist_ext.user_frames import filter_traceback, warn

__all__ = ["Records"]

_TOGETHER = 8 << 20  # bytes: neighbors are read together up to this
_LARGE = 1 << 15  # bytes: from here on, copying a record costs more than more calls to read it
_MOST_OPEN = 2048  # files held open, when the system allows it


ReadAt = Callable[[int, int], bytes]


@filter_traceback
class Records:
    """The records of TFRecord files, numbered through in the order of the files. Thread-safe.

    Attributes:
        files: the paths.
        skips: whether damaged records are skipped.
        bytes_read: bytes of records read so far, by this process, lengths and checksums included.
        skipped: number of the record -> what is wrong with it; with `on_error="skip"`.
        left_out: for each file that could not be walked to its end, what is wrong with it.

    Raises:
        DataError: no files, a file that cannot be read or, with `on_error="raise"`, one that is
            damaged where a record begins: named with record and offset.
    """

    def __init__(self, files: Sequence[str], *, on_error: str = "raise") -> None:
        if on_error not in ("raise", "skip"):
            raise DataError(f'on_error must be "raise" or "skip", got {shown(on_error)}.')
        if isinstance(files, str | bytes) or not len(files):
            raise DataError(f"files must be a list of paths, got {shown(files)}.")
        self.files = [str(path) for path in files]
        self.bytes_read = 0
        self.skipped: dict[int, str] = {}
        self.skips = on_error == "skip"
        self.indexes = indexes_of(self.files, on_error=on_error)
        self.left_out = [index.damaged() for index in self.indexes if index.damage]
        for damaged in self.left_out:
            warn(f"{damaged} The file's records from there on are skipped.")
        # The number of the first record of each file, and of all.
        counts = [index.records for index in self.indexes]
        self._first = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype(np.int64)
        self._open: OrderedDict[int, tuple[ReadAt, np.ndarray]] = OrderedDict()
        self._most_open = _allowed_open()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return int(self._first[-1])

    def read(self, indices: npt.ArrayLike) -> list[bytes | None]:
        """The payloads of these records, in this order.

        Args:
            indices: numbers of records in [0, len(self)), shape [n]; the same one may stand twice.

        Returns:
            n payloads; with `on_error="skip"`, None in the place of a damaged one, which is
            counted in `skipped` and named in a warning.

        Raises:
            DataError: there is no such record, or a record is damaged and `on_error` is "raise":
                named by file, record and offset.
        """
        return self.read_array(indices).tolist()

    def read_array(self, indices: npt.ArrayLike) -> np.ndarray:
        """As `read`, but an array of objects, which TensorFlow takes as it is."""
        wanted = np.asarray(indices)
        payloads = np.empty(wanted.size, object)
        if wanted.size == 0:
            return payloads
        if wanted.ndim != 1 or wanted.dtype.kind not in "iu":
            raise DataError(f"indices must be integers of shape [n], got {shown(indices)}.")
        if wanted.min() < 0 or wanted.max() >= len(self):
            beyond = wanted.min() if wanted.min() < 0 else wanted.max()
            raise DataError(
                f"indices must be below {len(self)}, the number of records, got {beyond}."
            )
        # In the order of files and offsets: neighbors are found, and a disk turns less.
        by_place = np.argsort(wanted, kind="stable")
        found = self._read_sorted(wanted[by_place].astype(np.int64))
        payloads[by_place] = np.fromiter(found, object, len(found))
        return payloads

    def _read_sorted(self, numbers: np.ndarray) -> list[bytes | None]:
        """The payloads of records whose numbers do not fall.

        What Python does for each record is most of the time of small ones, so all that can be
        done for many at once is.
        """
        files, starts, stops, read_at_of = self._places(numbers)
        sizes = stops - starts
        looks, ends = _looks(files, starts, stops)
        at, counts = starts[looks], stops[ends - 1] - starts[looks]
        # Lists beside one another, as a tuple for each record would wake the garbage collector.
        read_at = [read_at_of[file] for file in files[looks].tolist()]
        offset, count = at.tolist(), counts.tolist()
        payloads: list[bytes | None] = []
        for first, end in pairwise(_handfuls(counts)):
            low, high = int(looks[first]), int(ends[end - 1])
            alone = high - low == 1 and count[first] >= _LARGE
            if alone:
                # The payload apart: to cut it out would copy it.
                begin, end_at = offset[first], offset[first] + count[first]
                cuts = pairwise([begin, begin + HEADER, end_at - TAIL, end_at])
                read = [read_at[first](start, stop - start) for start, stop in cuts]
                there = [sum(map(len, read))]
            else:
                calls = zip(read_at[first:end], offset[first:end], count[first:end], strict=True)
                read = [look(start, size) for look, start, size in calls]
                there = list(map(len, read))
            with self._lock:
                self.bytes_read += sum(there)
            if there != count[first:end]:
                missing = np.repeat(at[first:end] + there, (ends - looks)[first:end])
                short = low + int(np.argmax(stops[low:high] > missing))
                where = self._where(int(numbers[short]), starts[short])
                raise DataError(f"{where}: the file has become shorter while it was in use.")
            if alone:
                found = [read[1] if is_record(*read) else None]
            else:
                found = payloads_of(b"".join(read), sizes[low:high])
            for i in [low + i for i, payload in enumerate(found) if payload is None]:
                self._damaged(int(numbers[i]), starts[i], sizes[i])
            payloads += found
        return payloads

    def _places(
        self, numbers: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, dict[int, ReadAt]]:
        """Where records are whose numbers do not fall.

        Returns:
            Of each record the number of its file, the offset there at which it begins, and that
            after its end; and what reads each of the files.
        """
        files = np.searchsorted(self._first, numbers, side="right") - 1
        starts, stops = np.empty_like(numbers), np.empty_like(numbers)
        read_at: dict[int, ReadAt] = {}
        cuts = np.flatnonzero(files[1:] != files[:-1]) + 1
        for low, high in pairwise([0, *cuts.tolist(), len(numbers)]):
            file = int(files[low])
            read_at[file], offsets = self._opened(file)  # what reads a file keeps it open
            records = numbers[low:high] - self._first[file]
            starts[low:high] = offsets[records]
            stops[low:high] = offsets[records + 1]
        return files, starts, stops, read_at

    def _where(self, number: int, start: int) -> str:
        """A record for an error: the file, its number there, and the offset."""
        file = int(np.searchsorted(self._first, number, side="right")) - 1
        return f"{self.files[file]}: record {number - self._first[file]} at byte {start}"

    def _damaged(self, number: int, start: int, size: int) -> None:
        """Raise, or count, that a record is not what was written."""
        where = self._where(number, start)
        message = f"{where} is damaged: its {size} bytes do not have the right checksum."
        if not self.skips:
            raise DataError(f'{message} Write the file again, or use on_error="skip" to skip it.')
        with self._lock:
            seen = number in self.skipped
            self.skipped[number] = message
        if not seen:
            warn(f"{message} It is skipped; skipped so far: {len(self.skipped)}.")

    def _opened(self, file: int) -> tuple[ReadAt, np.ndarray]:
        """A file's reader and its offsets; kept open for the next time, unless too many are."""
        with self._lock:
            opened = self._open.get(file)
            if opened is not None:
                self._open.move_to_end(file)
                return opened
        # A mapped index is slower to pick from than the plain array that it is.
        offsets = np.asarray(self.indexes[file].offsets())
        opened = open_bytes(self.files[file]).read_at, offsets
        with self._lock:
            opened = self._open.setdefault(file, opened)
            # Closed when the last thread that reads it is done.
            while len(self._open) > self._most_open:
                self._open.popitem(last=False)
        return opened


def _looks(
    files: np.ndarray, starts: np.ndarray, stops: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The first record of each look at a file, and the one after its last.

    Neighbors are read together, up to a limit.
    """
    new = _cuts((starts[1:] != stops[:-1]) | (files[1:] != files[:-1]))
    if len(new) <= len(starts):  # there are neighbors
        looks = new[:-1]
        piece = (starts - np.repeat(starts[looks], np.diff(new))) // _TOGETHER
        new = np.union1d(new, _cuts(piece[1:] != piece[:-1]))
    return new[:-1], new[1:]


def _handfuls(counts: np.ndarray) -> list[int]:
    """Where to cut looks of so many bytes into some that are held, and checked, together.

    Large ones stay alone: they need no copy then.
    """
    piece = np.cumsum(counts) // _TOGETHER
    large = counts >= _LARGE
    return _cuts((piece[1:] != piece[:-1]) | large[1:] | large[:-1]).tolist()


def _cuts(between: np.ndarray) -> np.ndarray:
    """Where pieces begin, and the end: of n + 1 things, with a cut or none in the n gaps."""
    return np.concatenate([[0], np.flatnonzero(between) + 1, [len(between) + 1]])


def _allowed_open() -> int:
    """How many files to hold open: each is two descriptors, and others need some, too."""
    try:
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    except (ImportError, OSError):  # not on Windows
        return 64
    return _MOST_OPEN if soft == resource.RLIM_INFINITY else max(8, min(_MOST_OPEN, soft // 4))
