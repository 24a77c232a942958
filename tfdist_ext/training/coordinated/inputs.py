"""Data that each worker of a parameter server cluster reads for itself."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist_ext.errors import TrainingError
from tfdist_ext.training.coordinated.calls import Calls

__all__ = ["WorkerBatches", "WorkerIterators"]


class WorkerIterators:
    """One pass: an iterator on each worker, and which workers have reached its end."""

    def __init__(self, of_workers: Any, workers: int, element_spec: Any):
        self.of_workers = of_workers
        self.element_spec = element_spec
        self.unfinished = set(range(workers))

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

    def __init__(self, calls: Calls, make: Any, element_spec: Any, endless: bool):
        self._calls = calls
        self._make = make
        self.element_spec = element_spec
        self.endless = endless
        self._datasets: Any = None

    @classmethod
    def from_function(
        cls, calls: Calls, function: Any, y: Any = None, sample_weight: Any = None, **options: Any
    ) -> WorkerBatches:
        """Call `function(tf.distribute.InputContext)` for each worker.

        Raises:
            TrainingError: it does not return a data set of batches; arguments beside it.
        """
        given = {"y": y, "sample_weight": sample_weight, **options}
        for name in ("y", "sample_weight", "batch_size", "class_weight"):
            if given.get(name) is not None:
                raise TrainingError(
                    f"{name} goes with arrays; a function of the input context arrived as data."
                    " Its data set yields all that belongs to a batch."
                )

        def dataset_of(worker: int) -> tf.data.Dataset:
            dataset = function(tf.distribute.InputContext(calls.workers, worker, 1))
            if not isinstance(dataset, tf.data.Dataset):
                raise TrainingError(
                    "the function given as data must return a tf.data.Dataset of batches; it"
                    f" returned {dataset!r}."
                )
            return dataset

        with tf.device("CPU:0"):
            here = [dataset_of(worker) for worker in range(calls.workers)]
        spec = here[0].element_spec
        endless = all(bool(d.cardinality() == tf.data.INFINITE_CARDINALITY) for d in here)

        def make() -> tf.data.Dataset:
            # A branch for each worker, so that the function gets a number, not a tensor.
            worker = tf.distribute.coordinator.experimental_get_current_worker_index()
            branches = [
                lambda worker=worker: tf.data.experimental.to_variant(dataset_of(worker))
                for worker in range(calls.workers)
            ]
            variant = tf.switch_case(tf.cast(worker, tf.int32), branches)
            return tf.data.experimental.from_variant(variant, spec).prefetch(tf.data.AUTOTUNE)

        return cls(calls, make, spec, endless)

    def __iter__(self) -> Any:
        if self._datasets is None:
            self._datasets = self._calls.coordinator.create_per_worker_dataset(self._make)
        return WorkerIterators(iter(self._datasets), self._calls.workers, self.element_spec)

    def on_epoch_begin(self) -> None:
        pass

    def on_epoch_end(self) -> None:
        pass
