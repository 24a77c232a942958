"""Trains one model on the same few batches, in plain Keras or on a strategy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist_ext.data.rows import batch_size_of, rows_between
from tfdist_ext.errors import TrainingError
from tfdist_ext.training import _keras_private as kp
from tfdist_ext.training.model import DistributedModel, check_counts, distribute
from tfdist_ext.training.protocols import Structure
from tfdist_ext.training.state.naming import METRICS, MODEL, state_of
from tfdist_ext.training.state.values import whole_value
from tfdist_ext.training.verification.result import Results, relative_differences

__all__ = ["Builder", "Trainings"]

Builder = Callable[[], keras.Model]
SEED = 1337


class Trainings:
    """Trainings of one model on the same data, each from new variables and the same seeds.

    Args:
        steps: global batches to train on; None: all of the data.
        fit: arguments of `fit`.

    Attributes:
        batches: the global batches of one epoch.
        shuffles: whether `fit` shuffles arrays.
        reading_difference: the difference of the first batch between two readings of a dataset.
    """

    def __init__(
        self,
        builder: Builder,
        strategy: tf.distribute.Strategy,
        data: Any,
        steps: int | None,
        fit: Mapping[str, Any],
        synchronize_batch_norm: bool | None,
    ):
        self._builder = builder
        self._strategy = strategy
        self._fit = {"verbose": 0, "shuffle": False, **fit}
        self._arrays: tuple[Any, ...] | None = None
        self.reading_difference = 0.0
        if isinstance(data, tuple):
            size = self._fit.setdefault("batch_size", 32)
            check_counts(batch_size=size, steps=steps)
            rows = int(batch_size_of(data))
            rows = rows if steps is None else min(rows, steps * size)
            # A smaller batch at the end gives parts of different sizes.
            rows = rows if rows % size else rows - size // 2
            self._arrays = rows_between(data, 0, rows)
            spans = [(first, min(first + size, rows)) for first in range(0, rows, size)]
            self.batches = [rows_between(data, *span) for span in spans]
        else:
            check_counts(steps=steps)
            self.batches = _read(data, steps)
            if not isinstance(data, Iterator):  # which can be read once
                self.reading_difference = _difference(self.batches[0], _read(data, 1)[0])
            self.batches = _with_smaller_end(self.batches)
        if not self.batches:
            raise TrainingError(_NO_BATCH)
        self.shuffles = bool(self._fit["shuffle"]) and isinstance(data, tuple)
        self._synchronize_batch_norm = synchronize_batch_norm
        self._can_predict = True

    @property
    def title(self) -> str:
        """What is compared, in two sentences."""
        sizes = ", ".join(str(int(batch_size_of(batch))) for batch in self.batches)
        return (
            f"{type(self._strategy).__name__} with {self._strategy.num_replicas_in_sync} replicas,"
            f" compared with plain Keras on one device. Rows in the global batches: {sizes}."
        )

    def plain(self, *, last_bit: bool = False, numpy_seed: int = SEED, **changed: Any) -> Results:
        """Trains in plain Keras; returns all numbers by kind and name.

        Args:
            last_bit: change the last bit of the inputs, or of the weights if no input is a float.
            numpy_seed: the seed of `np.random` when the training starts.
            changed: arguments of `fit` to change.
        """
        model = self.new_model()
        arrays, batches = self._arrays, self.batches
        if last_bit:
            arrays, batches = tf.nest.map_structure(_next_number, (arrays, batches))
            if not any(map(_is_float, tf.nest.flatten(self.batches))):
                for weight in model.trainable_weights:
                    weight.assign(_next_number(weight.numpy()))
        return self._train(model, model, arrays, batches, numpy_seed, changed)

    def distributed(self, *, synchronize_batch_norm: bool | None = None, **changed: Any) -> Results:
        """Trains on the strategy; returns all numbers by kind and name.

        Args:
            synchronize_batch_norm: as of `tfd.distribute`; None: as the caller of `verify` wants.
            changed: arguments of `fit` to change.
        """
        synchronize = synchronize_batch_norm or self._synchronize_batch_norm
        keras.utils.set_random_seed(SEED)
        model = distribute(self._builder, self._strategy, synchronize_batch_norm=synchronize)
        return self._train(model, model.keras_model, self._arrays, self.batches, SEED, changed)

    def new_model(self) -> keras.Model:
        """Returns a new model of plain Keras, from the seeds of all trainings."""
        keras.utils.set_random_seed(SEED)
        return self._builder()

    def _train(
        self,
        model: keras.Model | DistributedModel,
        inner: keras.Model,
        arrays: tuple[Any, ...] | None,
        batches: list[Structure],
        numpy_seed: int,
        changed: Mapping[str, Any],
    ) -> Results:
        keras.utils.set_random_seed(SEED)
        np.random.seed(numpy_seed)
        x, y, weights = (*(arrays or (_dataset(batches),)), None, None)[:3]
        fit = {**self._fit, **changed}
        history = model.fit(x, y, sample_weight=weights, **fit).history
        return {
            **_variables_of(inner),
            **{f"log {name}": np.asarray(values) for name, values in history.items()},
            **self._predictions(model),
        }

    def _predictions(self, model: keras.Model | DistributedModel) -> Results:
        """Returns the predictions for all batches, if plain Keras can predict."""
        if not self._can_predict:
            return {}
        inputs = [keras.utils.unpack_x_y_sample_weight(batch)[0] for batch in self.batches]
        try:
            outputs = model.predict(_dataset([(x,) for x in inputs]), verbose=0)
        except Exception:
            if isinstance(model, DistributedModel):
                raise
            self._can_predict = False  # the model has only a train_step
            return {}
        return {f"prediction {n}": part for n, part in enumerate(keras.tree.flatten(outputs))}


_NO_BATCH = "The data of verify has no batch."


def _read(data: Any, steps: int | None) -> list[Structure]:
    """Returns the first global batches of a dataset.

    Raises:
        TrainingError: there is none, or `steps` is None and there is no last one.
    """
    dataset = kp.get_data_adapter(data).get_tf_dataset()
    if steps is None and dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
        raise TrainingError("The dataset of verify has no end: pass steps.")
    batches = list(dataset if steps is None else dataset.take(steps))
    if not batches:
        raise TrainingError(_NO_BATCH)
    return batches


def _with_smaller_end(batches: list[Structure]) -> list[Structure]:
    """Returns the batches, the last one smaller: parts of different sizes show more."""
    sizes = {int(batch_size_of(batch)) for batch in batches}
    if len(sizes) == 1 and (size := sizes.pop()) > 1:
        return [*batches[:-1], rows_between(batches[-1], 0, size - size // 2)]
    return batches


def _difference(batch: Structure, other: Structure) -> float:
    """Returns the largest relative difference of two batches."""
    found, wanted = (
        {str(n): np.asarray(leaf) for n, leaf in enumerate(keras.tree.flatten(each))}
        for each in (other, batch)
    )
    return max(relative_differences(found, wanted).values())


def _dataset(batches: list[Structure]) -> tf.data.Dataset:
    """Returns a dataset of batches, whose number of rows is unknown to TensorFlow."""
    dataset = tf.data.Dataset.from_tensors(batches[0])
    for batch in batches[1:]:
        dataset = dataset.concatenate(tf.data.Dataset.from_tensors(batch))
    return dataset


def _is_float(part: Any) -> bool:
    return not isinstance(part, tf.SparseTensor | tf.RaggedTensor) and (
        tf.as_dtype(getattr(part, "dtype", tf.int32)).is_floating
    )


def _next_number(part: Any) -> Any:
    """Returns an array of floats with the next larger numbers; anything else as it is."""
    if part is None or not _is_float(part):
        return part
    array = np.asarray(part).astype(keras.config.floatx())
    return np.nextafter(array, np.inf)


def _variables_of(model: keras.Model) -> Results:
    """Returns the values of all variables of a model and its optimizers.

    The variables of metrics are left out: their results are logs.
    """
    values = {}
    trainable = {id(variable) for variable in model.trainable_weights}
    for path, variable in state_of(model).items():
        group, _, name = path.partition("/")
        if group == MODEL:
            kind = "weight" if id(variable) in trainable else "variable"
            values[f"{kind} {name}"] = whole_value(variable)
        elif group != METRICS:
            values[f"optimizer {path.removeprefix('optimizer.')}"] = whole_value(variable)
    seen: Counter[str] = Counter()
    for layer in kp.flat_layers(model):
        for attribute, value in vars(layer).items():
            if isinstance(value, tf.Variable):
                own = f"{type(layer).__name__}.{attribute}"
                seen[own] += 1
                number = f"#{seen[own]}" if seen[own] > 1 else ""
                values[f"variable {own}{number} (tf.Variable)"] = whole_value(value)
    return values
