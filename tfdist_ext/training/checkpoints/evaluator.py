"""`fit` in an `evaluator` task: evaluates each new checkpoint of the training."""

from __future__ import annotations

import functools
import os
import posixpath
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import keras
import tensorflow as tf

from tfdist_ext.cluster.jobs import ClusterDescription
from tfdist_ext.cluster.liveness import log_line
from tfdist_ext.cluster.liveness.watching import COORDINATOR_SILENT, GONE, TaskWatch
from tfdist_ext.errors import TrainingError
from tfdist_ext.launcher.exit_codes import RESTART
from tfdist_ext.strategies.cluster_tasks import RoleEnded
from tfdist_ext.training.callbacks.callback_state import Callbacks
from tfdist_ext.training.callbacks.worker_tensorboard import write_scalar
from tfdist_ext.training.checkpoints.folder import checkpoints_in, epochs_when_done
from tfdist_ext.training.checkpoints.format import (
    DamagedCheckpointError,
    Progress,
    os_errors,
    write_errors,
)

_LOOK_EVERY = 1.0  # seconds


def evaluate_checkpoints(
    model: Any,
    cluster: ClusterDescription,
    *,
    checkpoint_dir: str | Path | None,
    epochs: int,
    validation_data: Any,
    batch_size: int | None,
    steps: int | None,
    callbacks: Callbacks,
    verbose: str | int,
) -> NoReturn:
    """Evaluates the checkpoints that the training writes, until it is done.

    The scalars are `epoch_<metric>` by epoch and `evaluation_<metric>_vs_iterations` by step, as
    in Keras's TensorBoard callback. A checkpoint in the middle of an epoch has only the latter.
    They go to the folder `evaluator` in the `log_dir` of the given TensorBoard callback, else in
    `checkpoint_dir`. A checkpoint that was removed before its turn is skipped.

    Args:
        model: the DistributedModel, which gets the state of each checkpoint.
        cluster: in which this task is the evaluator.
        epochs: of the training; it is done when its `fit` has completed them.
        validation_data: as `fit` takes it; `batch_size` is that of the global batch.

    Raises:
        RoleEnded: always: with 0 when the training is done and all its checkpoints are evaluated,
            with 138 when the task that leads it is gone before.
        TrainingError: there is no `checkpoint_dir` or no validation data, or the scalars cannot be
            written.
    """
    me = str(cluster.task)
    if not checkpoint_dir or validation_data is None:
        raise TrainingError(
            f"{me} evaluates the checkpoints of the training. Call"
            " fit(validation_data=..., checkpoint_dir=...) on every task."
        )
    folder = os.fspath(checkpoint_dir)
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(validation_data)
    data = {"x": x, "y": y, "sample_weight": sample_weight, "batch_size": batch_size}
    # Keras's own argument, which a custom evaluate() of the model may ask for.
    options = {"verbose": 0, "return_dict": True, "_use_cached_eval_dataset": True}
    evaluate = functools.partial(model.evaluate, **data, **options)
    if not model.built:
        evaluate(steps=1)  # the model gets its shapes from data
    log_dir = _log_dir(callbacks, folder)
    with write_errors(log_dir), os_errors():
        writer = tf.summary.create_file_writer(log_dir)
    if verbose:
        log_line(f"{me}: evaluating the checkpoints in {folder}; scalars go to {log_dir}")
    for progress in _restored(model, folder, epochs, me, cluster):
        logs = evaluate(steps=steps)
        with writer.as_default():
            _write_scalars(logs, progress)
        writer.flush()
        if verbose:
            values = " - ".join(f"{name}: {value:.4f}" for name, value in logs.items())
            log_line(f"{me}: {progress}: {values}")
    writer.close()
    raise RoleEnded(0)


def _log_dir(callbacks: Callbacks, folder: str) -> str:
    """Returns the folder of the scalars: in the `log_dir` of a TensorBoard, or in `folder`."""
    callbacks = keras.tree.flatten(callbacks or [])
    boards = [
        board.log_dir for board in callbacks if isinstance(board, keras.callbacks.TensorBoard)
    ]
    return posixpath.join(str([*boards, folder][0]), "evaluator")


def _write_scalars(logs: dict[str, float], progress: Progress) -> None:
    for name, value in logs.items():
        write_scalar(f"evaluation_{name}_vs_iterations", value, progress.step)
        if not progress.batches:  # Keras counts epochs from 0
            write_scalar(f"epoch_{name}", value, progress.epoch - 1)


def _restored(
    model: Any, folder: str, epochs: int, me: str, cluster: ClusterDescription
) -> Iterator[Progress]:
    """Restores the next new checkpoint at each turn, until the training is done."""
    leader = None if cluster.driver is None else TaskWatch(*cluster.driver, COORDINATOR_SILENT)
    seen: set[str] = set()
    while True:
        gone = leader is not None and leader.state == GONE  # asked before the folder is read
        done = (epochs_when_done(folder) or 0) >= epochs  # also asked before
        path = next((path for path in checkpoints_in(folder) if path not in seen), None)
        if path is not None:
            seen.add(path)
            try:
                yield model.restore_checkpoint(path)
            except TrainingError as error:
                is_there = path in checkpoints_in(folder)  # else training is faster
                if is_there and not isinstance(error, DamagedCheckpointError):
                    raise
                log_line(f"{me}: {path} is not evaluated: {error}")
        elif done:
            return
        elif gone:
            log_line(f"{me}: {leader} is gone before the training in {folder} was complete")
            raise RoleEnded(RESTART)
        else:
            time.sleep(_LOOK_EVERY)
            if leader is not None:
                leader.look()
                leader.report_wait(me, cluster.source)
