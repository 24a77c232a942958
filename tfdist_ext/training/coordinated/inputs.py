"""Data that each worker of a parameter server cluster reads for itself."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_ext.data.pipelines import without_autotune
from tfdist_ext.errors import TrainingError
from tfdist_ext.training.coordinated.calls import Calls
from tfdist_ext.training.coordinated.carried import captures_resources
from tfdist_ext.training.coordinated.records import SpareRecords, WorkerRecords

__all__ = ["WorkerBatches", "WorkerIterators", "datasets_of_function", "in_turn"]


class WorkerIterators:
    """One pass: an iterator on each worker, and which workers' data has not come to its end.

    Elements are (number of the batch in the worker's data, batch).
    """

    def __init__(self, batches: WorkerBatches):
        self._batches = batches
        self.unfinished = set(range(batches.workers))
        self.of_workers: Any = None

    @property
    def records(self) -> WorkerRecords:
        return self._batches.records

    def begin(self, start: Sequence[np.ndarray]) -> np.ndarray:
        """Begin an execution in which metrics start like that; returns the workers' positions."""
        if self.of_workers is None:
            self._batches.keep_records_of(start)
            self.records.begin_pass()
            self.restart()
        return self.records.begin_execution(start)

    @property
    def element_spec(self) -> Any:
        """Specs of one batch."""
        return self._batches.element_spec

    def restart(self) -> None:
        """Let all workers go on where the records say that they are."""
        self.of_workers = self._batches.iterators()

    def of_worker(self, worker: tf.Tensor) -> Any:
        """In a graph: an iterator over the rest of a worker's data, on whichever worker it runs."""
        return iter(self._batches.rest_of(worker))

    def __next__(self) -> Any:
        raise TrainingError(
            "a function of the input context arrived as data: each worker reads its own, and this"
            " process reads none of it. So predict(), whose rows have an order, and going on in"
            " the middle of the data (checkpoint_dir) need arrays or a tf.data.Dataset instead."
        )


class WorkerBatches:
    """The data sets that a function makes, one for each worker; batches are those of a step.

    It has what `Epochs` uses of `GlobalBatches`.
    """

    steps = None
    batch_size = None
    later = None
    begin = 0
    done = staticmethod(lambda steps, logs: None)
    room = staticmethod(lambda: None)
    ended = staticmethod(lambda: None)
    agreed = False
    dataset = arrays = None

    def __init__(
        self, calls: Calls, spare: SpareRecords, dataset_of: Callable[[int], tf.data.Dataset]
    ):
        self._calls = calls
        self._dataset_of = dataset_of
        self.workers = calls.workers
        with tf.device("CPU:0"):
            here = [dataset_of(worker) for worker in range(calls.workers)]
        self.element_spec = here[0].element_spec
        self.endless = all(bool(d.cardinality() == tf.data.INFINITE_CARDINALITY) for d in here)
        self._spare = spare
        self._records: WorkerRecords | None = None
        self._datasets: Any = None

    @property
    def records(self) -> WorkerRecords:
        assert self._records is not None  # each pass begins with keep_records_of()
        return self._records

    def keep_records_of(self, states: Sequence[np.ndarray]) -> None:
        """Have records of steps whose metrics have states like these."""
        if self._records is None:
            numbers = sum(value.size for value in states)
            self._records = self._spare.lend(self, self.workers, numbers)

    def rest_of(self, worker: tf.Tensor) -> tf.data.Dataset:
        """In a graph: the batches of a worker's data that are not used yet, each with its number.

        A branch for each worker, so that the user's function gets a number, not a tensor.
        """
        branches = [
            lambda worker=worker: tf.data.experimental.to_variant(self._dataset_of(worker))
            for worker in range(self.workers)
        ]
        worker_index = tf.cast(worker, tf.int32)
        if self.workers == 1:
            variant = branches[0]()
        elif self._captures_resources():
            # Each worker has its own copy of a lookup table, chosen when the function is called. A
            # branch of a switch_case does not pass that on ("You must feed a value for placeholder
            # tensor"), so all data sets are made here, and one of them is read.
            variant = tf.stack([branch() for branch in branches])[worker_index]
        else:
            variant = tf.switch_case(worker_index, branches)
        dataset = tf.data.experimental.from_variant(variant, self.element_spec)
        position = self.records.position(worker)
        # Untuned: the coordinator's last word to a worker waits behind the end of its iterator.
        return without_autotune(
            dataset.skip(position).enumerate(position).prefetch(tf.data.AUTOTUNE)
        )

    def _captures_resources(self) -> bool:
        with tf.init_scope():
            return captures_resources(lambda: self._dataset_of(0))

    def iterators(self) -> Any:
        """An iterator on each worker; one for a worker that is started again is made by itself."""
        if self._datasets is None:
            index = tf.distribute.coordinator.experimental_get_current_worker_index
            self._datasets = self._calls.coordinator.create_per_worker_dataset(
                lambda: self.rest_of(tf.identity(index()))
            )
        return iter(self._datasets)

    def __iter__(self) -> WorkerIterators:
        return WorkerIterators(self)

    def on_epoch_begin(self) -> None:
        pass

    def on_epoch_end(self) -> None:
        pass


def datasets_of_function(
    function: Any, workers: int, y: Any = None, sample_weight: Any = None, **options: Any
) -> Callable[[int], tf.data.Dataset]:
    """What calls `function(tf.distribute.InputContext)` for a worker of that number.

    Raises:
        TrainingError: it takes no argument, or (when it is called) does not return a data set of
            batches; other arguments beside it.
    """
    given = {"y": y, "sample_weight": sample_weight, **options}
    for name in ("y", "sample_weight", "batch_size", "class_weight"):
        if given.get(name) is not None:
            raise TrainingError(
                f"{name} goes with arrays; a function of the input context arrived as data."
                " Its data set yields all that belongs to a batch."
            )

    _check_takes_context(function)

    def dataset_of(worker: int) -> tf.data.Dataset:
        dataset = function(tf.distribute.InputContext(workers, worker, 1))
        if not isinstance(dataset, tf.data.Dataset):
            raise TrainingError(
                "the function given as data must return a tf.data.Dataset of batches; it"
                f" returned {dataset!r}."
            )
        return dataset

    return dataset_of


def in_turn(dataset_of: Callable[[int], tf.data.Dataset], workers: int) -> tf.data.Dataset:
    """The batches of all workers' data sets, one of each in turn, for this process to read."""
    return tf.data.Dataset.choose_from_datasets(
        [dataset_of(worker) for worker in range(workers)],
        tf.data.Dataset.range(workers).repeat(),
        stop_on_empty_dataset=False,
    )


def _check_takes_context(function: Any) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some callables do not tell
        return
    try:
        signature.bind(None)
    except TypeError as error:
        raise TrainingError(
            "a function given as data is called with one tf.distribute.InputContext for each"
            f" worker; this one takes {signature}. Write"
            " `def data(context): ... dataset.shard(context.num_input_pipelines,"
            " context.input_pipeline_id)`, or pass the tf.data.Dataset itself."
        ) from error
