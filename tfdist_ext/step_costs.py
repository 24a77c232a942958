"""Measures a training step of a model on one device, and plans it for several workers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist_ext.data.pipelines import Structure, batch_size_of, rows_between
from tfdist_ext.errors import PlacementError
from tfdist_ext.messages import check_int, shown
from tfdist_ext.placement.live.learning import learn_specs
from tfdist_ext.placement.scaling import (
    Network,
    StepCost,
    WorkersPlan,
    parse_rate,
    parse_seconds,
)
from tfdist_ext.placement.specs import VariableSpec, itemsize
from tfdist_ext.training import distribute
from tfdist_ext.training.variables import default_strategy
from tfdist_ext.training.verify import first_batches
from tfdist_ext.user_frames import filter_traceback

_TIMED_SECONDS, _MOST_STEPS, _ROUNDS = 1.0, 1000, 3  # of each batch size
_SMALLER = 4  # times smaller is the second batch, which shows the fixed time of a step


@filter_traceback
def plan_workers(
    builder: Callable[[], keras.Model],
    data: Any = None,
    *,
    workers: Sequence[int] = (1, 2, 4, 8, 16),
    network: str = "10Gbit",
    latency: float | str = 1e-4,
    step_seconds: float | str | None = None,
    batch_size: int = 32,
    straggling: float = 0.0,
) -> WorkersPlan:
    """Plans how fast a model would train on several workers, before you have the machines.

    The function times steps of the model on one device of this machine. It counts the bytes of
    gradients, of rows of tables and of slots, and computes the time in which workers sum gradients.
    The computed times are for workers that are as fast as this machine, and sum gradients as on
    its devices (CPUs or GPUs).

    Args:
        builder: a function without arguments that returns the compiled model.
        data: as in `tfd.verify`: arrays `(x, y)`, a dataset of batches, or a function that returns
            one of them. The first batch is used. Without data, pass `step_seconds`. The gradient of
            a table then counts as a whole.
        workers: the numbers of workers.
        network: the rate at which a worker sends, such as "10Gbit" or "100Mbit/s".
        latency: the time until a message arrives, in seconds or as "0.1ms".
        step_seconds: the time of a step of one batch, measured elsewhere, as 0.35 or "350ms". The
            time of a smaller batch is then taken as proportional.
        batch_size: the rows of a batch of arrays, or of the step of `step_seconds` without data.
        straggling: the standard deviation of the time of a step between workers, relative to the
            mean. All workers wait for the slowest.

    Returns:
        A `WorkersPlan`, to be printed.

    Raises:
        PlacementError: an argument is invalid, the model is not compiled, or the data is empty.
    """
    counts = _counts(workers)
    link = Network(
        bandwidth=parse_rate(network),
        latency=parse_seconds(latency, "latency"),
        # The buckets of `multi_worker_mirrored` on this machine's devices.
        bucket_bytes=0 if tf.config.list_physical_devices("GPU") else None,
        straggling=parse_seconds(straggling, "straggling"),
    )
    seconds = None if step_seconds is None else parse_seconds(step_seconds, "step_seconds")
    batch_size = check_int(batch_size, "batch_size", 1, error=PlacementError)
    _check(builder, data, seconds)
    if data is None:
        assert seconds is not None
        step = _cost(learn_specs(builder), [], seconds, batch_size)
    else:
        step = _measured(builder, data, batch_size, seconds)
    return WorkersPlan(step, link, counts)


def _check(builder: object, data: object, seconds: float | None) -> None:
    """Checks arguments of `plan_workers` before the model is built."""
    if isinstance(builder, keras.Model) or not callable(builder):
        raise PlacementError(
            f"plan_workers trains the model, so it needs a function, got {shown(builder)}."
        )
    if seconds == 0 or (seconds is None and data is None):
        raise PlacementError(
            "plan_workers needs data to time steps (data=, --data), or the time of a step above 0"
            " (step_seconds=, --step)."
        )


def _counts(workers: Iterable[int]) -> tuple[int, ...]:
    """The numbers of workers, sorted."""
    numbers = {
        check_int(number, "a number of workers", 1, error=PlacementError) for number in workers
    }
    if not numbers:
        raise PlacementError("workers must be numbers such as (1, 2, 4), got none.")
    return tuple(sorted(numbers))


def _measured(
    builder: Callable[[], keras.Model], data: Any, batch_size: int, seconds: float | None
) -> StepCost:
    """Trains a few steps, and returns their cost.

    Args:
        seconds: the time of a step; None to measure it.
    """
    model = builder()
    if not isinstance(model, keras.Model) or not getattr(model, "compiled", False):
        raise PlacementError(f"builder must return a compiled Keras model, got {shown(model)}.")
    batches = first_batches(data() if callable(data) else data, batch_size, 1)
    if not batches:
        raise PlacementError("The data passed to plan_workers is empty: it has no batch.")
    (batch,) = batches
    rows = int(batch_size_of(batch))
    gradients = _gradients(model, batch)
    tables = [gradient for gradient in gradients if isinstance(gradient, tf.IndexedSlices)]
    specs = learn_specs(model)
    if seconds is not None:
        return _cost(specs, tables, seconds, rows)
    model = distribute(model, default_strategy())
    seconds, fixed, fewer = _time_of_step(model, batch), 0.0, rows // _SMALLER
    if fewer:
        less = _time_of_step(model, rows_between(batch, 0, fewer))
        fixed = min(max((rows * less - fewer * seconds) / (rows - fewer), 0.0), seconds)
    return _cost(specs, tables, seconds, rows, fixed)


def _gradients(model: keras.Model, batch: Structure) -> list[Any]:
    """Trains a step eagerly; returns the gradients that the model's optimizer gets."""
    optimizer, eagerly, gradients = model.optimizer, model.run_eagerly, list[Any]()
    apply = optimizer.apply

    def record(grads: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
        gradients.extend(grads := list(grads))
        return apply(grads, *args, **kwargs)

    optimizer.apply, model.run_eagerly = record, True
    model.train_on_batch(*keras.utils.unpack_x_y_sample_weight(batch))
    del optimizer.apply
    model.run_eagerly, model.train_function = eagerly, None
    return gradients


def _time_of_step(model: keras.Model, batch: Structure) -> float:
    """Returns the seconds of a step of `fit` with this batch."""
    dataset = tf.data.Dataset.from_tensors(batch).repeat()

    def run(steps: int) -> float:
        begun = time.perf_counter()
        model.fit(dataset, steps_per_epoch=steps, verbose=0)
        return (time.perf_counter() - begun) / steps

    run(1)  # traces
    steps = int(min(max(_TIMED_SECONDS / run(2), 1), _MOST_STEPS))
    return min(run(steps) for _ in range(_ROUNDS))


def _cost(
    specs: Sequence[VariableSpec],
    tables: Sequence[tf.IndexedSlices],
    seconds: float,
    rows: int,
    fixed_seconds: float = 0.0,
) -> StepCost:
    """The cost of a step.

    Args:
        tables: gradients that have rows of variables.
    """
    trained = [spec for spec in specs if spec.trainable]
    whole = sum(spec.weight_bytes for spec in trained)
    in_rows = sum(int(np.prod(table.dense_shape)) * table.dtype.size for table in tables)
    return StepCost(
        seconds=seconds,
        fixed_seconds=fixed_seconds,
        rows=rows,
        dense_bytes=whole - in_rows,
        table_values=sum(int(tf.size(table.values)) for table in tables),
        table_ids=sum(int(tf.size(table.indices)) for table in tables),
        tables=len(tables),
        itemsize=max((itemsize(spec.dtype) for spec in trained), default=4),
        trained_bytes=whole,
        other_bytes=sum(spec.weight_bytes for spec in specs if not spec.trainable),
        slot_bytes=sum(spec.bytes - spec.weight_bytes for spec in specs),
    )
