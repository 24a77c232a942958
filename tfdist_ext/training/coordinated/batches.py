"""Global batches as they travel to workers: several in one remote call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

__all__ = ["Parcel", "batch_of", "parcels", "specs_of"]


class Parcel(NamedTuple):
    """Global batches, one after another in each tensor, and the rows at which each one ends.

    Without any it stands for a step that has nothing to compute with.
    """

    tensors: list[Any]
    ends: list[int]


def parcels(iterator: Any, n: int, most: int) -> Iterator[Parcel]:
    """`n` global batches, or fewer where the data ends, at most `most` in a parcel.

    Batches go together where their rows are of the same shape, however many they are.
    """
    waiting: list[list[Any]] = []
    for _ in range(n):
        try:
            (part,) = next(iterator)
        except (StopIteration, tf.errors.OutOfRangeError):
            break
        if not int(part[0]):  # all of its records are damaged
            yield Parcel([], [])
            continue
        tensors = _tensors(part[-1])
        if waiting and (len(waiting) == most or not _go_together(waiting[0], tensors)):
            yield from _packed(waiting, most)
            waiting = []
        waiting.append(tensors)
    yield from _packed(waiting, most)


def specs_of(iterator: Any) -> tuple[Any, list[Any]]:
    """(structure of a global batch, specs of its tensors) that `batch_of` and `Parcel` use."""
    (part,) = iterator.element_spec
    return part[-1], _tensors(part[-1])


def batch_of(
    structure: Any, tensors: Sequence[Any], ends: tf.Tensor, number: int, batches: int
) -> Any:
    """One global batch out of a parcel, in its own structure."""
    if batches > 1:
        start = ends[number - 1] if number else 0
        tensors = [tensor[start : ends[number]] for tensor in tensors]
    left = iter(tensors)
    return keras.tree.map_structure(lambda spec: None if spec is None else next(left), structure)


def _tensors(batch: Any) -> list[Any]:
    return [leaf for leaf in keras.tree.flatten(batch) if leaf is not None]


def _go_together(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return all(
        isinstance(a, tf.Tensor)
        and isinstance(b, tf.Tensor)
        and a.shape.rank > 0
        and a.shape[1:] == b.shape[1:]
        for a, b in zip(one, other, strict=True)
    )


def _packed(batches: list[list[Any]], most: int) -> Iterator[Parcel]:
    """One parcel of `most` batches, or one for each: two sizes, so two functions to compile."""
    if len(batches) < most:
        for tensors in batches:
            yield Parcel(tensors, [0])
        return
    ends, end = [], 0
    for tensors in batches:
        end += int(tensors[0].shape[0]) if len(batches) > 1 else 0
        ends.append(end)
    yield Parcel([tf.concat(each, axis=0) for each in zip(*batches, strict=True)], ends)
