"""The state of a model: names and whole values of its variables, and the chief's for all workers.

Keras counts names in the whole process: a layer is `dense` in one job and `dense_3` in the next. In
the names of `state_of` the numbers count within the layer or model that holds the parts.

A mirrored variable has a copy on each replica. A partitioned one has pieces of its rows on several
parameter servers. Both are read and written in blocks of rows, so a table that needs several
servers never has to fit into this process.
"""

from __future__ import annotations

import contextlib
import io
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias, TypeVar

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tfdist_ext.errors import TrainingError
from tfdist_ext.placement.live.creating import pieces_of
from tfdist_ext.training._keras_private import flat_layers, layers_of, raw_value, set_raw_value
from tfdist_ext.training.agreement.equality import from_each_worker
from tfdist_ext.training.agreement.task_status import Reduction
from tfdist_ext.training.variables import (
    ShardedSlot,
    attributes_of,
    default_strategy,
    local_copies,
    optimizers_of,
    sharded_slots,
    with_inner_optimizers,
)

MODEL, METRICS = "model", "metrics"  # all other groups are optimizers

BLOCK_BYTES = 16 * 2**20
_TABLE_BYTES = 64 * 2**20

Variable: TypeAlias = keras.Variable | tf.Variable

_NUMBERED = re.compile(r"(.*?)(?:_(\d+))?", re.S)
_TEXT = 2000  # bytes of an error message that the other workers get

_SAME_WEIGHTS = (
    "All workers train one model together. Assign the same values on every worker, for example from"
    " a generator with a seed, or load them with load_weights()."
)
_DRIFT = 1e-4  # of a sum: each worker rounds in its own way

_Part = TypeVar("_Part")
_Result = TypeVar("_Result")


def state_of(model: keras.Model) -> dict[str, Variable]:
    """Returns `group/name` -> variable, of the model, the metrics, and each optimizer.

    A model has weights, moving statistics, counters, states of seed generators, and tf.Variables
    of the user. An optimizer has slots, its counter of steps, a learning rate that is not a
    schedule, and a loss scale. The group of an optimizer has the attribute and the class, such as
    `optimizer.Adam`.
    """
    named: list[tuple[str, Variable]] = [
        (f"{METRICS}/{metric_name}/{name}", variable)
        for metric_name, metric in _renumbered((metric.name, metric) for metric in model.metrics)
        for name, variable in _renumbered((v.name, v) for v in metric.variables)
    ]
    named += _variables_in(model, f"{MODEL}/")
    # Metrics are parts of the model, too, and a shared layer counts where it comes first.
    by_id = {id(variable): (name, variable) for name, variable in reversed(named)}
    state = dict(reversed(by_id.values()))
    slots = {  # an optimizer names its slots after the variables it trains
        variable.path.replace("/", "_"): name.partition("/")[2].replace("/", "_")
        for name, variable in state.items()
        if isinstance(variable, keras.Variable)
    }
    for attribute, optimizer in optimizers_of(model).items():
        if optimizer.built:
            kinds = [type(inner).__name__ for inner in with_inner_optimizers(optimizer)]
            group = ".".join([attribute.replace("/", "_"), *kinds])
            owners = [(variable, owner_path(variable, slots)) for variable in optimizer.variables]
            named = [(slots.get(p, "") + v.name.removeprefix(p), v) for v, p in owners]
            state |= {f"{group}/{name}": variable for name, variable in _renumbered(named)}
    return {name: variable for name, variable in state.items() if raw_value(variable) is not None}


def group_of(name: str) -> str:
    """Returns the group of a name of `state_of`."""
    return name.partition("/")[0]


def check_has_variables(model: keras.Model, call: str) -> None:
    """Raises TrainingError if the model has no variables yet."""
    if not model.built:
        raise TrainingError(
            f"{call}() needs the variables of {model.name!r}, which is not built. Start the model"
            " with keras.Input(shape), or call build(), fit() or predict() first."
        )


def own_variables(layer: keras.Layer) -> dict[str, tf.Variable]:
    """Returns attribute -> tf.Variable of a user's layer, which Keras does not list."""
    fields = attributes_of(layer, tf.Variable)
    return {n: v for n, v in fields.items() if v.dtype != tf.string and v.shape.is_fully_defined()}


def _variables_in(layer: keras.Layer, parent: str) -> Iterator[tuple[str, Variable]]:
    """Yields (path, variable); the path is the variable's place in the model.

    The variable's own path says where its layer was built, and may differ in a copy.
    """
    inner = flat_layers(layer, recursive=False, include_self=False)
    of_inner = {id(variable) for part in inner for variable in part.variables}
    own = [(v.name, v) for v in layer.variables if id(v) not in of_inner]
    own += own_variables(layer).items()
    for name, variable in _renumbered(own):
        yield parent + name, variable
    for name, part in _renumbered((part.name, part) for part in inner):
        yield from _variables_in(part, f"{parent}{name}/")


def _renumbered(parts: Iterable[tuple[str, _Part]]) -> Iterator[tuple[str, _Part]]:
    """Yields (new name, part): `dense_7` and `dense_9` become `dense` and `dense#1`."""
    split = []
    for name, part in parts:
        match = _NUMBERED.fullmatch(name)
        assert match is not None  # it matches anything
        split.append((match[1], int(match[2] or 0), part))
    seen: Counter[str] = Counter()
    for word, _, part in sorted(split, key=lambda entry: entry[:2]):
        yield f"{word}#{seen[word]}" if seen[word] else word, part
        seen[word] += 1


def owner_path(slot: keras.Variable, paths: Iterable[str]) -> str:
    """Returns which of the paths an optimizer's slot is named after; "" for a counter.

    Args:
        paths: of variables, with "_" in place of "/".
    """
    return max((path for path in paths if slot.name.startswith(f"{path}_")), key=len, default="")


def whole_value(variable: keras.Variable) -> np.ndarray:
    """Returns the value of a variable: its first copy, its pieces joined."""
    value = np.empty(tuple(variable.shape), raw_value(variable).dtype.as_numpy_dtype)
    for start, stop in blocks(variable):
        np.atleast_1d(value)[start:stop] = read_rows(variable, start, stop)
    return value


def has_equal_copies(variable: Variable) -> bool:
    """Whether the local copies of a variable are equal to the bit."""
    for piece, _, _ in pieces_of(raw_value(variable)):
        first, *others = (copy.read_value().numpy().tobytes() for copy in copies_of_piece(piece))
        if any(other != first for other in others):
            return False
    return True


def assign_whole(variable: keras.Variable, value: npt.ArrayLike) -> None:
    """Assigns a value to every copy and every piece of a variable."""
    rows = np.broadcast_to(value, tuple(variable.shape))
    _assign_rows(variable, 0, np.atleast_1d(rows))


def snapshot(variables: Iterable[keras.Variable]) -> Callable[[], None]:
    """Returns a function that gives variables the values that they have now."""
    values = [(variable, whole_value(variable)) for variable in variables]

    def restore() -> None:
        for variable, value in values:
            assign_whole(variable, value)

    return restore


def blocks(value: Variable | np.ndarray) -> Iterator[tuple[int, int]]:
    """Yields (first row, row after the last) of blocks of at most BLOCK_BYTES.

    A scalar is one row. A block has at least one row, however big that is.
    """
    rows, *rest = tuple(value.shape) or (1,)
    item = value.itemsize if isinstance(value, np.ndarray) else raw_value(value).dtype.size
    row_bytes = int(np.prod(rest, dtype=np.int64)) * item
    step = max(1, BLOCK_BYTES // max(1, row_bytes))
    for start in range(0, rows, step):
        yield start, min(rows, start + step)


def read_rows(value: Variable | np.ndarray, start: int, stop: int) -> np.ndarray:
    """Returns the rows from `start` up to `stop`; of a scalar, an array of one value.

    The rows may be a view of the memory of a tensor. TensorFlow never changes that memory.
    """
    if isinstance(value, np.ndarray):
        return np.atleast_1d(value)[start:stop]
    variable = raw_value(value)
    row_bytes = math.prod(tuple(value.shape)[1:]) * variable.dtype.size
    parts = []
    for piece, first, end in pieces_of(variable):
        low, high = max(start, first) - first, min(stop, end) - first
        if low >= high:
            continue
        copy = copies_of_piece(piece)[0]
        is_local = "CPU" in copy.device and "/job:ps" not in copy.device
        # If single rows of a table were assigned, TensorFlow copies the table at a read.
        is_local &= (end - first) * row_bytes <= _TABLE_BYTES
        if is_local or high - low == end - first:
            read = copy.read_value()
            rows = np.asarray(read) if read.shape.rank else np.atleast_1d(read.numpy())
            parts.append(rows[low:high])
        else:  # a gather runs where the variable is, and only these rows are moved
            parts.append(copy.sparse_read(tf.range(low, high)).numpy())
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def assign_blocks(variable: Variable, parts: Iterable[np.ndarray]) -> None:
    """Assigns the rows of a variable, in every copy and every piece.

    TensorFlow copies a variable at each read once single rows of it were assigned. So the rows of a
    variable are collected, and assigned together. Those of a table are assigned in blocks, and so
    are those of a variable on parameter servers.

    Args:
        parts: the rows of each of the `blocks` of the variable; of a scalar, an array of one value.
    """
    shape, dtype = tuple(variable.shape) or (1,), raw_value(variable).dtype
    piece, _, _ = next(iter(pieces_of(raw_value(variable))))
    on_server = "/job:ps" in copies_of_piece(piece)[0].device
    in_blocks = on_server or is_table(variable)
    value = np.empty((0,) if in_blocks else shape, dtype.as_numpy_dtype)
    for (start, stop), rows in zip(blocks(variable), parts, strict=False):
        if in_blocks:
            _assign_rows(variable, start, rows)
        else:
            value[start:stop] = rows
    if not in_blocks:
        _assign_rows(variable, 0, value)


def _assign_rows(variable: Variable, start: int, values: np.ndarray) -> None:
    for piece, first, end in pieces_of(raw_value(variable)):
        low, high = max(start, first), min(start + len(values), end)
        if low >= high:
            continue
        part = tf.constant(values[low - start : high - start], piece.dtype)
        for copy in copies_of_piece(piece):
            if high - low == end - first:
                copy.assign(tf.reshape(part, copy.shape))
            else:
                copy.scatter_update(tf.IndexedSlices(part, tf.range(low - first, high - first)))
                if "/job:ps" in copy.device:  # it would hold blocks that wait
                    copy.sparse_read(tf.zeros([1], tf.int32)).numpy()


def is_table(variable: Variable) -> bool:
    """Whether a variable may be too large for a second copy in this process.

    It is larger than 1 GiB, or replicas share one copy of at least 64 MiB.
    """
    raw = raw_value(variable)
    size = math.prod(tuple(variable.shape)) * raw.dtype.size
    # Central storage and `placed` wrap a variable that replicas share.
    shared = any(hasattr(piece, "get") for piece, _, _ in pieces_of(raw))
    return size > 2**30 or (shared and size >= _TABLE_BYTES)


def copies_of_piece(piece: tf.Variable) -> list[tf.Variable]:
    """Returns the plain variables that are the local copies of a piece."""
    strategy = getattr(piece, "distribute_strategy", None)
    return local_copies(piece, default_strategy() if strategy is None else strategy)


def run_on_chief(reduction: Reduction, action: Callable[[], _Result], what: str) -> _Result | None:
    """Runs `action` on the chief; every worker must call, and returns when it is done.

    Returns:
        On the chief the result of the action, elsewhere None.

    Raises:
        Exception: what the action raises, on the chief.
        TrainingError: on the others, with the chief's message.
    """
    failure, result = None, None
    if reduction.is_chief:
        try:
            result = action()
        except Exception as error:  # the others must not wait for a chief that has failed
            failure = error
    if not reduction.any_worker(failure is not None):
        return result
    words = broadcast_bytes(reduction, f"{type(failure).__name__}: {failure}".encode()[:_TEXT])
    if failure is not None:
        raise failure
    time.sleep(1)  # the chief's own error is shown first
    raise TrainingError(f"The chief could not {what}: {words.decode(errors='replace')}")


def check_equal_weights(reduction: Reduction, model: keras.Model) -> None:
    """Compares sums of weights, and numbers such as learning rates; every worker must call.

    Raises:
        TrainingError: on every worker, if the values of one differ from the first worker's.
    """
    shared = {id(slot.variable) for slot in _slots_of(model)}
    slots = [v for optimizer in optimizers_of(model).values() for v in optimizer.variables]
    numbers = [v for v in slots if not tuple(v.shape) and id(v) not in shared]
    numeric = [v for v in (*model.weights, *numbers) if v.dtype != "string"]
    if not numeric:
        return
    first, *others = from_each_worker(reduction, np.array(list(map(_sums, numeric))))
    for worker, other in enumerate(others, 1):
        with np.errstate(invalid="ignore"):  # infinite sums
            differ = np.abs(first - other)[:, 0] > _DRIFT * np.maximum(first, other)[:, 1]
        for number in np.flatnonzero(differ)[:1]:
            tasks, path = reduction.task_names(), numeric[number].path
            raise TrainingError(
                f"{path} must be the same on all workers, but its sum is {first[number, 0]:.6g} on"
                f" {tasks[0]} and {other[number, 0]:.6g} on {tasks[worker]}. {_SAME_WEIGHTS}"
            )


def _sums(variable: keras.Variable) -> list[float]:
    """The sum of the values and the sum of their sizes, which need memory for a block of rows."""
    rows = (read_rows(variable, *block) for block in blocks(variable))
    sums = [(part.sum(dtype=np.float64), np.abs(part).sum(dtype=np.float64)) for part in rows]
    return np.array(sums).reshape(-1, 2).sum(0).tolist()


def broadcast_variables(reduction: Reduction, variables: Iterable[Variable]) -> None:
    """Gives every worker the chief's values, to the bit; every worker must call.

    Small variables are sent together, and large ones in blocks, so that a big model needs little
    more memory than it has.
    """
    if not reduction.multi_worker:
        return
    different = {id(raw_value(variable)): variable for variable in variables}
    messages: dict[int, list[tuple[Variable, int, int]]] = {}
    size = 0
    for variable in different.values():
        row_bytes = int(np.prod(tuple(variable.shape)[1:])) * raw_value(variable).dtype.size
        for start, stop in blocks(variable):
            messages.setdefault(size // BLOCK_BYTES, []).append((variable, start, stop))
            size += (stop - start) * row_bytes

    def received() -> Iterator[np.ndarray]:
        for parts in messages.values():
            before = [read_rows(*part) for part in parts]
            data = b"".join(rows.tobytes() for rows in before)
            data = _summed(reduction, data if reduction.is_chief else bytes(len(data)))
            values = io.BytesIO(data)
            for rows in before:
                yield np.frombuffer(values.read(rows.nbytes), rows.dtype).reshape(rows.shape)

    rows_of_all = received()
    for variable in different.values():
        assign_blocks(variable, rows_of_all)


def broadcast_state(reduction: Reduction, model: keras.Model) -> None:
    """Gives every worker the chief's state, except the slots that workers share."""
    shared = {id(slot.variable) for slot in _slots_of(model)}
    variables = state_of(model).values()
    broadcast_variables(reduction, [v for v in variables if id(v) not in shared])
    for layer in layers_of(model, keras.layers.Normalization):
        layer.finalize_state()  # its call uses constants


@contextlib.contextmanager
def whole_slots(
    reduction: Reduction, model: keras.Model, *, everywhere: bool = False, restores: bool = False
) -> Iterator[None]:
    """Scope in which slots that workers share are whole on the chief; every worker must enter it.

    Args:
        everywhere: they are whole on all workers.
        restores: the chief assigns them. At the end each worker gets its part of the values.
    """
    slots = _slots_of(model)
    parts = [raw_value(slot.variable) for slot in slots]
    try:
        for slot, part in zip(slots, parts, strict=True):
            flat = np.zeros(math.prod(slot.shape), part.dtype.as_numpy_dtype)
            own = part.numpy().reshape(-1)
            for worker, start, stop in slot.owners:
                if worker == reduction.worker:
                    flat[start:stop], own = own[: stop - start], own[stop - start :]
            summed = _summed(reduction, flat.tobytes())
            if reduction.is_chief or everywhere:
                whole = np.frombuffer(summed, flat.dtype).reshape(slot.shape)
                set_raw_value(slot.variable, tf.Variable(whole, trainable=False), slot.shape)
        yield
        values = [raw_value(slot.variable).numpy().tobytes() for slot in slots if restores]
    finally:
        for slot, part in zip(slots, parts, strict=True):
            set_raw_value(slot.variable, part, tuple(part.shape))
    for slot, part, value in zip(slots, parts, values, strict=False):
        data = broadcast_bytes(reduction, value if reduction.is_chief else b"")
        flat = np.frombuffer(data, part.dtype.as_numpy_dtype)
        own_elements = [flat[a:b] for worker, a, b in slot.owners if worker == reduction.worker]
        if own_elements:
            slot.variable.assign(np.concatenate(own_elements).reshape(tuple(part.shape)))


def _slots_of(model: keras.Model) -> list[ShardedSlot]:
    return [slot for slots in map(sharded_slots, optimizers_of(model).values()) for slot in slots]


def sharded_bytes(model: keras.Model) -> tuple[int, int]:
    """Returns the bytes of the slots that workers share: on this worker, and on all of them."""
    slots = [(slot, raw_value(slot.variable)) for slot in _slots_of(model)]
    here = sum(part.dtype.size * math.prod(part.shape) for _, part in slots)
    return here, sum(part.dtype.size * math.prod(slot.shape) for slot, part in slots)


def broadcast_bytes(reduction: Reduction, data: bytes) -> bytes:
    """Returns the chief's bytes; every worker must call."""
    size = int(reduction.from_chief(len(data)))
    return _summed(reduction, data if reduction.is_chief else bytes(size))


def _summed(reduction: Reduction, data: bytes) -> bytes:
    """Returns the sum over workers of bytes that are 0 on all workers but one."""
    summed = []
    for start in range(0, len(data), BLOCK_BYTES):
        part = data[start : start + BLOCK_BYTES]
        # Any collective can sum these numbers.
        words = np.frombuffer(part + bytes(-len(part) % 4), np.int32)
        summed.append(reduction.sum_over_workers(words).tobytes()[: len(part)])
    return b"".join(summed)
