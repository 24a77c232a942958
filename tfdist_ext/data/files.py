"""Which files a shard reads: balanced by bytes, and the same answer for every task."""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfdist_ext.data.file_bytes import is_local, open_bytes, stamp_of
from tfdist_ext.data.record_format import HEADER, is_header
from tfdist_ext.data.record_index import RecordIndex, index_of, indexes_of, is_index
from tfdist_ext.data.shards import Shard, assign
from tfdist_ext.errors import DataError
from tfdist_ext.messages import shown
from tfdist_ext.user_frames import filter_traceback, warn

__all__ = ["RecordRange", "files_of", "shard_files"]

_AT_ONCE = 16  # files looked at; most of the time of a remote one is waiting


class RecordRange(NamedTuple):
    """Some records of a TFRecord file.

    Attributes:
        path: of the file.
        start: number of the first record, counted from 0 in the file.
        stop: number after the last record.
    """

    path: str
    start: int
    stop: int


@filter_traceback
def shard_files(
    patterns: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    shard: Shard,
    *,
    check: bool = True,
) -> list[str] | list[RecordRange]:
    """The files that belong to a shard; disjoint and complete over all shards.

    The largest file goes first, each onto the shard with the fewest bytes, so shards differ by at
    most the largest file that came last. Where there are fewer files than shards, each shard gets
    ranges of records with the same number of bytes, up to a record, and a warning says so; for
    that, all must be uncompressed TFRecord files.

    Args:
        patterns: a path, a pattern (`*`, `?`, `[a-z]`) or a list of them, for whatever
            `tf.io.gfile` opens. Every task must see the same files under the same names.
        shard: whose files.
        check: walk this shard's TFRecord files to their end, so that a truncated one is an error,
            and an empty one a warning, now and not hours later. That builds their index, once, and
            keeps it beside them. All files of the shard count as such where one of them does.

    Returns:
        Sorted paths, which `tf.data.TFRecordDataset` takes, or ranges in the order of paths.

    Raises:
        DataError: a pattern that matches no file; a file that cannot be read, is truncated, or of
            which no records can be counted where that is needed: each by its name.
    """
    if not isinstance(shard, Shard):
        raise DataError(
            f"shard must be a Shard(index, count), got {shown(shard)}; Shard.of(cluster) makes one."
        )
    files = files_of(patterns)
    if len(files) < shard.count:
        return _ranges(files, shard)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        sizes = [stamp.size for stamp in pool.map(stamp_of, files)]
        mine = [files[i] for i in assign(sizes, shard.count)[shard.index]]
        if check:
            _check(mine, pool)
    return mine


def files_of(patterns: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> list[str]:
    """All files that patterns match, each once, sorted; no index files of this package.

    Raises:
        DataError: no patterns, one that matches no file, or a file system that cannot be looked at.
    """
    if isinstance(patterns, str | bytes | os.PathLike) or not isinstance(patterns, Iterable):
        patterns = [patterns]
    given = list(patterns)
    for pattern in given:
        if not isinstance(pattern, str | os.PathLike):
            raise DataError(
                f"files must be patterns or paths as text, got {shown(pattern)}; give one, or a"
                " list."
            )
    if not given:
        raise DataError("files must have at least one pattern, got []; name the data.")
    found = set().union(*(_matches(os.fspath(pattern)) for pattern in given))
    # One file may be given in several spellings: "a", "./a".
    one_each = {os.path.abspath(path) if is_local(path) else path: path for path in sorted(found)}
    return sorted(one_each.values())


def _matches(pattern: str) -> set[str]:
    try:
        if tf.io.gfile.exists(pattern):  # a name with "[1]" in it is itself, not a pattern
            return {pattern}
        found = {path for path in tf.io.gfile.glob(pattern) if not is_index(path)}
    except tf.errors.OpError as error:
        raise DataError(f"{pattern!r} cannot be looked for: {error.message}.") from None
    if not found:
        where = f" (from {os.getcwd()})" if is_local(pattern) and not os.path.isabs(pattern) else ""
        raise DataError(
            f"no file matches {pattern!r}{where}. Is the folder there, and mounted on this machine?"
        )
    return found


def _check(paths: list[str], pool: ThreadPoolExecutor) -> None:
    """Opens the files; where one begins as a TFRecord file, or is called so, walks to its end.

    One that is damaged at its very beginning is known by its name, or by the others.
    """
    begin = list(pool.map(lambda path: is_header(open_bytes(path).read_at(0, HEADER)), paths))
    if any(begin) or any("tfrecord" in path.rpartition("/")[2].lower() for path in paths):
        list(pool.map(index_of, paths))


def _ranges(files: list[str], shard: Shard) -> list[RecordRange]:
    try:
        indexes = indexes_of(files)
    except DataError as error:
        raise DataError(
            f"{len(files)} files for {shard.count} shards: each shard would get a part of a file,"
            f" by records. {error}"
        ) from None
    warn(
        f"{len(files)} files for {shard.count} shards: each shard reads ranges of records inside"
        f" of files. With {shard.count} files or more, each would read files of its own."
    )
    records = sum(index.records for index in indexes)
    if records < shard.count:
        raise DataError(
            f"each of {shard.count} shards must have a record, got {records} records in"
            f" {len(files)} files. Use fewer workers, or give the same data to each."
        )
    begin, end = _cuts(indexes, shard.count)[shard.index : shard.index + 2].tolist()
    found, first = [], 0  # the number of a file's first record
    for index in indexes:
        start, stop = max(begin - first, 0), min(end - first, index.records)
        if start < stop:
            found.append(RecordRange(index.path, start, stop))
        first += index.records
    return found


def _cuts(indexes: list[RecordIndex], count: int) -> np.ndarray:
    """The record each shard begins with, over all files, and the end: `count` + 1 numbers.

    The first record at or after the shard's part of all bytes, but at least one record a shard.
    """
    file_ends = np.cumsum([index.stamp.size for index in indexes], dtype=np.int64)
    first_records = np.cumsum([0, *(index.records for index in indexes)], dtype=np.int64)
    total = int(file_ends[-1])
    wanted = np.array([total * i // count for i in range(count + 1)], np.int64)
    files = np.searchsorted(file_ends, wanted, side="left")
    cuts = np.zeros(count + 1, np.int64)
    for file in np.unique(files):
        here = files == file
        in_file = wanted[here] - (file_ends[file] - indexes[file].stamp.size)
        offsets = indexes[file].offsets()
        cuts[here] = first_records[file] + np.searchsorted(offsets, in_file, side="left")
    shards = np.arange(count + 1)
    cuts = np.maximum.accumulate(cuts - shards) + shards
    return np.minimum(cuts, first_records[-1] - count + shards)
