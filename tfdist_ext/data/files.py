"""Which files a shard reads: balanced by bytes, and the same answer on every task."""

from __future__ import annotations

import heapq
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import tensorflow as tf

from tfdist_ext.data.file_bytes import is_local, stamp_of
from tfdist_ext.data.record_index import begins_with_record, indexes_of, is_index
from tfdist_ext.data.shards import Shard
from tfdist_ext.errors import DataError
from tfdist_ext.messages import shown
from tfdist_ext.user_frames import filter_traceback

__all__ = ["assign", "files_of", "shard_files"]

_AT_ONCE = 16  # files; opening a remote file is mostly waiting

Patterns = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


@filter_traceback
def shard_files(patterns: Patterns, shard: Shard, *, check: bool = True) -> list[str]:
    """The files of a shard. Each file belongs to one shard.

    Shards get about the same number of bytes: the largest file goes first, each to the shard with
    the fewest bytes.

    Args:
        patterns: a path, a pattern (`*`, `?`, `[a-z]`) or a list of them, on any file system that
            `tf.io.gfile` opens. Every task must see the same files under the same names.
        shard: selects the files to return.
        check: read the length fields of this shard's TFRecord files, so that a truncated file is
            an error now. The shard's files count as TFRecord files if one of them begins with a
            record or has "tfrecord" in its name.

    Returns:
        Sorted paths.

    Raises:
        DataError: a pattern matches no file; there are fewer files than shards; or a file cannot be
            read or is truncated.
    """
    if not isinstance(shard, Shard):
        raise DataError(
            f"shard must be a Shard(index, count), got {shown(shard)}; Shard.of(cluster) makes one."
        )
    files = files_of(patterns)
    if len(files) < shard.count:
        raise DataError(
            f"{len(files)} files are not enough for {shard.count} shards. Write more files, or use"
            " from_tfrecords, which shares out records."
        )
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        sizes = [size for size, _ in pool.map(stamp_of, files)]
        mine = [files[i] for i in assign(sizes, shard.count)[shard.index]]
        if check and (
            any("tfrecord" in path.rpartition("/")[2].lower() for path in mine)
            or any(list(pool.map(begins_with_record, mine)))
        ):
            indexes_of(mine)
    return mine


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
        found = {path for path in tf.io.gfile.glob(pattern) if not is_index(path)}
    except tf.errors.OpError as error:
        raise DataError(f"{pattern!r} cannot be searched: {error.message}.") from None
    if not found:
        where = f" (from {os.getcwd()})" if is_local(pattern) and not os.path.isabs(pattern) else ""
        raise DataError(
            f"no file matches {pattern!r}{where}. Check that the folder exists on this machine."
        )
    return found


def assign(sizes: Sequence[int], count: int) -> list[list[int]]:
    """Divide sizes into `count` shares with about equal sums.

    The largest size goes first, each to the share with the smallest sum. The largest sum is at most
    4/3 of the optimum (Graham 1969, "Bounds on multiprocessing timing anomalies").

    Returns:
        The positions in `sizes` of each share, rising.
    """
    shares: list[list[int]] = [[] for _ in range(count)]
    # (sum, number of sizes, share): sizes of 0 are spread, too.
    filled = [(0, 0, share) for share in range(count)]
    for position in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        total, number, share = heapq.heappop(filled)
        shares[share].append(position)
        heapq.heappush(filled, (total + sizes[position], number + 1, share))
    return [sorted(share) for share in shares]
