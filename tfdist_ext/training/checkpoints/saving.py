"""What a `DistributedModel` writes and reads.

In a cluster the chief writes and reads, and sends its state to the others. So a folder on the
chief's own disk is enough, and no task can read another file than the others.
"""

from __future__ import annotations

import functools
import io
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import keras
import tensorflow as tf

from tfdist_ext.errors import TrainingError
from tfdist_ext.training._keras_private import global_seed_generator, seed_state
from tfdist_ext.training.agreement.task_status import Reduction
from tfdist_ext.training.callbacks.callback_state import CallbackState
from tfdist_ext.training.checkpoints.format import (
    Arrays,
    CheckpointFile,
    Progress,
    differences,
    encode_checkpoint,
    open_checkpoint,
    write_atomically,
)
from tfdist_ext.training.state import (
    METRICS,
    MODEL,
    assign_blocks,
    blocks,
    broadcast_bytes,
    broadcast_state,
    group_of,
    run_on_chief,
    state_of,
    whole_slots,
)
from tfdist_ext.training.variables import optimizers_of

# The state of callbacks, and of the generator that draws without a seed.
_OTHERS, _SEEDS = "others", "seed_generator"

_SHOWN = 6  # variables that a message names

_Result = TypeVar("_Result")


def write_checkpoint(
    model: keras.Model, reduction: Reduction, progress: Progress, path: str
) -> None:
    """Writes a checkpoint on the chief; every task must call.

    Raises:
        TrainingError: the path is a folder, or the file cannot be written.
    """

    def write() -> None:
        if tf.io.gfile.isdir(path):
            raise TrainingError(f"{path} is a folder, but a checkpoint is a file. Add a file name.")
        report = functools.partial(reduction.peers.enters, "checkpoint")
        write_atomically(path, encode_checkpoint(progress, arrays_of(model, {}), report))

    with whole_slots(reduction, model):
        run_on_chief(reduction, write, f"write the checkpoint {path}")


def load_on_chief(
    model: keras.Model, reduction: Reduction, load: Callable[[], _Result], what: str
) -> _Result | None:
    """Loads state on the chief, and sends it to the others; every task must call.

    Returns:
        On the chief the result of `load`, elsewhere None.
    """
    with whole_slots(reduction, model, restores=True):
        try:
            result = run_on_chief(reduction, load, what)
        except Exception:  # on every task; a part may have been read
            broadcast_state(reduction, model)
            raise
        broadcast_state(reduction, model)
        return result


def arrays_of(model: keras.Model, callbacks: CallbackState) -> Arrays:
    """Returns what a checkpoint holds: all state of the model, and that of callbacks."""
    seeds = seed_state()
    others = callbacks if seeds is None else {**callbacks, _SEEDS: seeds}
    return {**state_of(model), **{f"{_OTHERS}/{name}": array for name, array in others.items()}}


def at_step(progress: Progress, model: keras.Model) -> Progress:
    """Returns the progress with the steps of the compiled optimizer, or else the most of any."""
    optimizers = optimizers_of(model)
    counting = [optimizers["optimizer"]] if "optimizer" in optimizers else optimizers.values()
    steps = [int(optimizer.iterations.numpy()) for optimizer in counting]
    return replace(progress, step=max(steps, default=progress.step))


def restore_checkpoint(
    model: keras.Model, reduction: Reduction, path: str
) -> tuple[Progress, CallbackState]:
    """Restores the state in a checkpoint; every task must call.

    Returns:
        The progress of the training, and the state of its callbacks.

    Raises:
        TrainingError: on every task: the file is missing, is not a checkpoint, is incomplete or
            damaged, or is of another model or optimizer. The model is unchanged then, except if
            the file disappears while it is read.
    """

    def read() -> bytes:
        report = functools.partial(reduction.peers.enters, "checkpoint")
        with open_checkpoint(path, report) as file:
            variables = _variables_to_restore(file, model, path)
            for name, variable in variables.items():
                rows = functools.partial(file.read_rows, file.arrays[name])
                assign_blocks(variable, itertools.starmap(rows, blocks(variable)))
            others = {n: file.read(a) for n, a in file.arrays.items() if group_of(n) == _OTHERS}
            return b"".join(encode_checkpoint(file.progress, others))

    sent = load_on_chief(model, reduction, read, f"read the checkpoint {path}") or b""
    received = CheckpointFile(io.BytesIO(broadcast_bytes(reduction, sent)), path)
    arrays = received.arrays.items()
    callbacks = {name.partition("/")[2]: received.read(array) for name, array in arrays}
    seeds = callbacks.pop(_SEEDS, None)
    if seeds is not None:
        global_seed_generator().state.assign(seeds)
    return received.progress, callbacks


def _variables_to_restore(
    file: CheckpointFile, model: keras.Model, path: str
) -> dict[str, keras.Variable]:
    """Returns name -> variable.

    If the model or the checkpoint has no optimizer, optimizers are left alone. Metrics take what
    the file has.

    Raises:
        TrainingError: another model, or another optimizer.
    """
    state = state_of(model)
    ignored = {METRICS, _OTHERS}
    optimizers = [{*map(group_of, names)} - {MODEL} - ignored for names in (state, file.arrays)]
    has_optimizers = model.compiled and optimizers_of(model)  # maybe not built yet
    if not (has_optimizers and optimizers[1]):
        ignored.update(*optimizers)
    current, saved = (
        {
            name: f"{tf.as_dtype(array.dtype).name} {tuple(array.shape)}"
            for name, array in named.items()
            if group_of(name) not in ignored
        }
        for named in (state, file.arrays)
    )
    if differing := differences(saved, current):
        raise TrainingError(
            f"{path} is a checkpoint of another model or optimizer:"
            f" {'; '.join(differing[:_SHOWN])}. Use the code that wrote it, or another checkpoint"
            " or folder. Build an optimizer of your own step before you restore it:"
            " optimizer.build(variables)."
        )
    return {
        name: variable
        for name, variable in state.items()
        if name in file.arrays and file.arrays[name].shape == tuple(variable.shape)
    }
