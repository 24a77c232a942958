"""Trains one model on the same few batches, in plain Keras or on a strategy."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist_ext.data.pipelines import batch_size_of, rows_between
from tfdist_ext.errors import TfDistError, TrainingError
from tfdist_ext.training import _keras_private as kp
from tfdist_ext.training.model import check_counts, distribute
from tfdist_ext.training.protocols import Structure
from tfdist_ext.training.state import MODEL, group_of, state_of, whole_value
from tfdist_ext.training.verification.result import Results

__all__ = ["Trainings", "dataset_of"]

SEED = 1337


class Trainings:
    """Trainings of one model on the same data, each from new variables and the same seeds.

    Args:
        builder: creates the compiled model.
        data: arrays (x, y) or (x, y, sample_weight), or a dataset.
        steps: global batches to train on.
        fit: arguments of `fit`.
        synchronize_batch_norm: as of `tfd.distribute`.

    Attributes:
        batches: the global batches of one epoch; the last one is smaller.
        rows: the number of rows of each batch.
        order_changes: whether a dataset begins with another batch when it is read again.
    """

    def __init__(
        self,
        builder: Callable[[], keras.Model],
        data: Any,
        steps: int,
        fit: Mapping[str, Any],
        synchronize_batch_norm: bool | None,
    ):
        self._builder = builder
        self._synchronize_batch_norm = synchronize_batch_norm
        self._fit = {"verbose": 0, "shuffle": False, **fit}
        check_counts(batch_size=self._fit.get("batch_size"), steps=steps)
        self.batches = self._read(data, steps)
        if not self.batches:
            raise TrainingError("The data of verify has no batch.")
        self.order_changes = False
        if not isinstance(data, Iterator):  # it can be read once
            again = self._read(data, 1)
            self.order_changes = _bytes_of(self.batches[0]) != _bytes_of(again[0])
        self.rows = [int(batch_size_of(batch)) for batch in self.batches]
        if self.rows[-1] == self.rows[0]:  # parts of different sizes show more
            self.rows[-1] -= self.rows[0] // 2
            self.batches[-1] = rows_between(self.batches[-1], 0, self.rows[-1])

    def new_model(self) -> keras.Model:
        """Returns a new model of plain Keras, from the seeds of all trainings."""
        keras.utils.set_random_seed(SEED)
        return self._builder()

    def train(
        self,
        strategy: tf.distribute.Strategy | None = None,
        *,
        synchronize_batch_norm: bool = False,
        last_bit: bool = False,
        numpy_seed: int = SEED,
        **changed: Any,
    ) -> Results:
        """Trains in plain Keras or on a strategy; returns all numbers by kind and name.

        Args:
            strategy: None for plain Keras.
            synchronize_batch_norm: turn it on.
            last_bit: change the last bit of the inputs, or of the weights if no input is a float.
            numpy_seed: the seed of `np.random` when the training starts.
            changed: arguments of `fit` to change.
        """
        build: Callable[[], Any] = self._builder
        if strategy is not None:
            wanted = synchronize_batch_norm or self._synchronize_batch_norm
            build = functools.partial(distribute, build, strategy, synchronize_batch_norm=wanted)
        keras.utils.set_random_seed(SEED)
        model = build()
        inner = getattr(model, "keras_model", model)
        batches = self.batches
        if last_bit:
            batches = tf.nest.map_structure(_next_number, batches, expand_composites=True)
            if not any(map(_is_float, tf.nest.flatten(batches, expand_composites=True))):
                for weight in inner.trainable_weights:
                    weight.assign(_next_number(weight.numpy()))
        keras.utils.set_random_seed(SEED)
        np.random.seed(numpy_seed)
        logs = model.fit(dataset_of(batches), **{**self._fit, **changed}).history
        return {
            **_values_of(inner),
            **{f"log {name}": np.asarray(values) for name, values in logs.items()},
            **self._predictions(model),
        }

    def _read(self, data: Any, steps: int) -> list[Structure]:
        """Returns the first global batches."""
        x, y, weights = (*(data if isinstance(data, tuple) else (data,)), None, None)[:3]
        size = self._fit.get("batch_size") or 32
        dataset = kp.get_data_adapter(x, y, weights, batch_size=size).get_tf_dataset()
        return list(dataset.take(steps))

    def _predictions(self, model: Any) -> Results:
        """Returns the predictions for all batches; none if plain Keras cannot predict, either."""
        inputs = [keras.utils.unpack_x_y_sample_weight(batch)[0] for batch in self.batches]
        try:
            outputs = model.predict(dataset_of([(x,) for x in inputs]), verbose=0)
        except TfDistError:
            raise
        except Exception:  # the model has only a train_step
            return {}
        return {f"prediction {n}": part for n, part in enumerate(keras.tree.flatten(outputs))}


def _bytes_of(batch: Structure) -> list[bytes]:
    parts = tf.nest.flatten(batch, expand_composites=True)
    return [tf.io.serialize_tensor(part).numpy() for part in parts if part is not None]


def dataset_of(batches: Sequence[Structure]) -> tf.data.Dataset:
    """Returns a dataset of batches, whose number of rows is unknown to TensorFlow."""
    dataset = tf.data.Dataset.from_tensors(batches[0])
    for batch in batches[1:]:
        dataset = dataset.concatenate(tf.data.Dataset.from_tensors(batch))
    return dataset


def _is_float(part: Any) -> bool:
    return tf.as_dtype(getattr(part, "dtype", tf.int32)).is_floating


def _next_number(part: Any) -> Any:
    """Returns an array of floats with the next larger numbers; anything else as it is."""
    if not _is_float(part):
        return part
    return np.nextafter(np.asarray(part).astype(keras.config.floatx()), np.inf)


def _values_of(model: keras.Model) -> dict[str, np.ndarray]:
    """Returns the values of all variables of a model and its optimizers, by kind and name."""
    values = {}
    trainable = {id(variable) for variable in model.trainable_weights}
    state = state_of(model)
    counters = [path for path in state if path.endswith("/iteration") and whole_value(state[path])]
    used = {group_of(path) for path in counters}  # Keras does not build an optimizer without use
    for path, variable in state.items():
        group, _, name = path.partition("/")
        if group == MODEL:
            kind = "weight" if id(variable) in trainable else "variable"
            values[f"{kind} {name}"] = whole_value(variable)
        elif group in used:
            values[f"optimizer {path.removeprefix('optimizer.')}"] = whole_value(variable)
    for number, layer in enumerate(kp.flat_layers(model)):
        for attribute, value in vars(layer).items():
            if isinstance(value, tf.Variable):
                own = f"{type(layer).__name__}.{attribute}"
                values[f"variable {own} (tf.Variable in layer {number})"] = whole_value(value)
    return values
