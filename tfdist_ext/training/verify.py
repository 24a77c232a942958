"""tfd.verify: the same training in plain Keras on one device and on a strategy, compared."""

from __future__ import annotations

import contextlib
import copy
import functools
import textwrap
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import keras
import ml_dtypes
import numpy as np
import tensorflow as tf

from tfdist_ext.data._keras_private import get_data_adapter
from tfdist_ext.data.pipelines import Structure, batch_size_of, rows_between
from tfdist_ext.data.sharded import ShardedDataset
from tfdist_ext.errors import TfDistError, TrainingError, address_of
from tfdist_ext.messages import counted
from tfdist_ext.strategies.owned_sums import sums_of
from tfdist_ext.training._keras_private import layers_of
from tfdist_ext.training.agreement.equality import describe_data
from tfdist_ext.training.distribution import check_counts
from tfdist_ext.training.model import distribute_on
from tfdist_ext.training.state import (
    METRICS,
    MODEL,
    has_equal_copies,
    state_of,
    whole_slots,
    whole_value,
)
from tfdist_ext.training.variables import default_strategy
from tfdist_ext.user_frames import filter_traceback

Results = Mapping[str, np.ndarray]  # "weight dense/kernel", "log loss": kind and name

TOLERANCE = 1e-5  # default for the largest relative difference that counts as equal
SMALLEST_SCALE = 1e-3  # differences of numbers that are all smaller are relative to this
# A change of last bits is one rounding. Another order of additions rounds in each addition.
ROUNDING_FACTOR = 100.0
_KINDS = ("weight", "variable", "optimizer", "log", "prediction", "data")  # first words of names
_ROW = "{:10}  {:10}  {:8}  {:9}  {}"
# Addresses of pages stay whole.
_wrapped = textwrap.TextWrapper(100, break_long_words=False, break_on_hyphens=False).fill

_SEED = 1337


@dataclass(frozen=True)
class Verification:
    """The result of `tfd.verify`. Print it to read the differences as a table.

    Attributes:
        title: a description of both trainings.
        differences: maps each variable, log and prediction to its largest difference, relative to
            its largest number. The difference is `inf` if only one training has NaN, or if the
            shapes differ.
        rounding: the differences between two trainings in plain Keras. In the second training, the
            last bits of weights and inputs are changed. Empty if no difference exceeds `tolerance`.
        tolerance: the largest relative difference that counts as equal.
        error: the message of the error that ended the training on the strategy, or "".
    """

    title: str
    differences: Mapping[str, float]
    rounding: Mapping[str, float]
    tolerance: float
    error: str = ""

    @property
    def equal(self) -> bool:
        """Whether rounding explains all differences."""
        return not self.error and not self.unequal

    @property
    def unequal(self) -> list[str]:
        """The names of values that differ by more than rounding, the largest difference first."""
        names = [name for name, value in self.differences.items() if value > self.allowed(name)]
        return sorted(names, key=lambda name: -self.differences[name])

    def allowed(self, name: str) -> float:
        """Returns the largest difference of a variable or log that counts as rounding."""
        return max(self.tolerance, ROUNDING_FACTOR * self.rounding.get(name, 0.0))

    def __str__(self) -> str:
        verdict = "EQUAL: the model trains as it does on one device."
        if names := self.unequal:
            count = f"{len(names)} of {len(self.differences)}"
            verdict = f"NOT EQUAL: {count} compared values differ, the most in {names[0]}."
        if self.error:
            verdict = f"NOT EQUAL: {self.error}"
        notes = [verdict]
        if self.unequal:
            page = address_of("docs/troubleshooting.md#losses-differ-from-one-device")
            notes.append(f"Causes: {page}")
        table = [self._table()] if self.differences else []
        return "\n\n".join([_wrapped(self.title), *table, *map(_wrapped, notes)])

    def _table(self) -> str:
        rows = [_ROW.format("kind", "difference", "rounding", "", "largest in")]
        for kind in _KINDS:
            names = [name for name in self.differences if name.split()[0] == kind]
            if names:
                unequal = [name for name in self.unequal if name in names]
                worst = max(unequal or names, key=self.differences.__getitem__)
                explained = "rounding" if self.differences[worst] > self.tolerance else "equal"
                verdict = "DIFFERENT" if unequal else explained
                numbers = self.differences[worst], self.rounding.get(worst)
                shown = ("-" if number is None else f"{number:.1e}" for number in numbers)
                rows.append(_ROW.format(kind, *shown, verdict, worst.removeprefix(f"{kind} ")))
        return "\n".join(rows)


@filter_traceback
def verify(
    builder: Callable[[], keras.Model],
    data: Any,
    strategy: tf.distribute.Strategy,
    *,
    steps: int = 3,
    tolerance: float | None = None,
    synchronize_batch_norm: bool | None = None,
    lazy_updates: bool = False,
    **fit: Any,
) -> Verification:
    """Trains a model in plain Keras and on a strategy, and compares the results.

    Both trainings use the same global batches. The last batch is smaller. The comparison includes
    weights, other variables, optimizer state, logs, and predictions after the training.
    With several workers, all workers make this call with the same data.

    Args:
        builder: a function without arguments that returns the compiled model. It is called several
            times.
        data: arrays `(x, y)` or `(x, y, sample_weight)`, a dataset that yields global batches, or a
            function without arguments that returns one of them. A function is called twice: if the
            results differ, the data is not the same on all workers.
        strategy: a synchronous strategy with at least two replicas.
        steps: the number of global batches per epoch. Both trainings use the first batches, in the
            same order.
        tolerance: the largest relative difference that counts as equal. The default is 1e-5. With
            `gradient_dtype` it is four times the distance from 1 to the next number of this type:
            0.03 for bfloat16 and 0.004 for float16. A larger difference also
            counts as equal if rounding explains it. To estimate rounding, `verify` trains plain
            Keras again with the last bits of weights and inputs changed. Rounding explains up to
            100 times the difference between both trainings.
        synchronize_batch_norm: the argument of `tfd.distribute`.
        lazy_updates: the argument of `tfd.distribute`. If True, the training on one device is one
            with lazy updates, too, and not one of plain Keras.
        fit: other arguments of `fit`, such as `batch_size` (global), `epochs` and
            `validation_data`. Arrays are not shuffled. Each training gets a copy of the callbacks.

    Returns:
        A `Verification`, to be printed.

    Raises:
        TrainingError: the strategy trains asynchronously or has one replica, `builder` is not a
            function, or the data contains no batch.
        ValueError: Keras rejects an argument of `fit`, such as `validation_split` for a dataset.
    """
    if isinstance(strategy, tf.distribute.ParameterServerStrategy):
        raise TrainingError(
            "verify cannot compare parameter servers with one device, because they train"
            ' asynchronously. Verify the model with create_strategy("mirrored", logical_cpus=4).'
        )
    if strategy.num_replicas_in_sync < 2:
        raise TrainingError(
            "verify needs at least 2 replicas, got 1: an equal result would prove nothing about"
            ' several. Pass create_strategy("mirrored", logical_cpus=2) (--devices 2).'
        )
    trainings = Trainings(builder, data, steps, synchronize_batch_norm, lazy_updates, **fit)
    return trainings.compare(strategy, tolerance)


class Trainings:
    """Trainings of one model on the same data, each from new variables and the same seeds.

    Takes the arguments of `verify`.

    Attributes:
        batches: the global batches of one epoch; the last one is smaller.
        rows: the number of rows of each batch.
        order_changes: whether the data function returns another first batch when called again.
    """

    def __init__(
        self,
        builder: Callable[[], keras.Model],
        data: Any,
        steps: int = 3,
        synchronize_batch_norm: bool | None = None,
        lazy_updates: bool = False,
        **fit: Any,
    ):
        if isinstance(builder, keras.Model) or not callable(builder):
            raise TrainingError(
                f"verify creates the model several times, so it needs a function, got {builder!r}."
            )
        self._builder = builder
        self._synchronize_batch_norm = synchronize_batch_norm
        self._lazy_updates = lazy_updates
        self._fit = {"verbose": 0, "shuffle": False, **fit}
        check_counts(batch_size=self._fit.get("batch_size"), steps=steps)
        made = data() if callable(data) else data
        size = self._fit.get("batch_size")
        self.batches = first_batches(made, size, steps)
        if not self.batches:
            raise TrainingError("The data passed to verify is empty: it has no batch.")
        self.order_changes = False
        # A dataset is not compared with itself: a seeded shuffle has a new order in each iteration.
        if callable(data) and (again := data()) is not made:
            first = first_batches(again, size, 1)
            texts = [describe_data(batch, "") for batch in (self.batches[0], *first)]
            self.order_changes = texts[:1] != texts[1:]
        self.rows = [int(batch_size_of(batch)) for batch in self.batches]
        if self.rows[-1] == self.rows[0]:  # parts of different sizes show more
            self.rows[-1] -= self.rows[0] // 2
            self.batches[-1] = rows_between(self.batches[-1], 0, self.rows[-1])

    def compare(
        self, strategy: tf.distribute.Strategy, tolerance: float | None = None
    ) -> Verification:
        """Returns the result of `verify`, also for a strategy with one replica."""
        narrow = sums_of(strategy).narrow
        other = "lazy updates" if self._lazy_updates else "plain Keras"
        title = (
            f"{type(strategy).__name__} with {counted(strategy.num_replicas_in_sync, 'replica')},"
            f" compared with {other} on one device. Rows in the global batches:"
            f" {str(self.rows)[1:-1]}."
        )
        if narrow is not None:
            title += (
                f" Gradients travel as {narrow.dtype.name} (gradient_dtype), which rounds them."
            )
        if tolerance is None:
            epsilon = 0.0 if narrow is None else float(ml_dtypes.finfo(narrow.dtype.name).eps)
            tolerance = max(TOLERANCE, 4 * epsilon)
        with warnings.catch_warnings():
            warnings.simplefilter("default", UserWarning)  # no warning of a training is an error
            try:
                differences = self.differences(strategy)
            except TfDistError as error:
                return Verification(title, {}, {}, tolerance, error=str(error))
            if self.order_changes:
                differences["data first batch"] = float("inf")
            result = Verification(title, differences, {}, tolerance)
            if result.unequal:
                result = replace(result, rounding=self.differences(last_bit=True))
            return result

    @functools.cached_property
    def plain(self) -> Results:
        """All numbers of the training in plain Keras, by kind and name."""
        return self._train()

    def differences(
        self, strategy: tf.distribute.Strategy | None = None, **options: Any
    ) -> dict[str, float]:
        """Trains again; returns name -> largest relative difference from `plain`.

        Args:
            strategy: None for plain Keras.
            options: of `_train`.
        """
        plain = self.plain  # first: an error in plain Keras is not one of the strategy
        return relative_differences(self._train(strategy, **options), plain)

    def _train(
        self,
        strategy: tf.distribute.Strategy | None = None,
        *,
        last_bit: bool = False,
    ) -> Results:
        """Trains in plain Keras or on a strategy; returns all numbers by kind and name.

        Args:
            last_bit: change the last bits of the initial weights and of the inputs.
        """
        build: Callable[[], Any] = self._builder
        if strategy is not None or self._lazy_updates:
            build = functools.partial(
                distribute_on,
                build,
                strategy or default_strategy(),
                synchronize_batch_norm=self._synchronize_batch_norm,
                lazy_updates=self._lazy_updates,
            )
        keras.utils.set_random_seed(_SEED)
        model = build()
        if strategy is None and self._synchronize_batch_norm:
            # The other formula of a synchronized layer is more exact, on one device, too.
            for layer in layers_of(model, keras.layers.BatchNormalization):
                layer.synchronized = True
        batches = self.batches
        if last_bit:
            random = np.random.default_rng(_SEED)
            for weight in model.trainable_weights:
                weight.assign(_neighbors(weight.numpy(), random))
            batches = [_with_neighbors(batch, random) for batch in batches]
        keras.utils.set_random_seed(_SEED)
        callbacks = copy.deepcopy(self._fit.get("callbacks"))  # some cannot be used twice
        logs = model.fit(_dataset_of(batches), **{**self._fit, "callbacks": callbacks}).history
        whole: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if strategy is not None:
            whole = whole_slots(model._tfdist_ext.reduction, model, everywhere=True)
        with whole:
            of_variables = _values_of(model)
        return {
            **of_variables,
            **{f"log {name}": np.asarray(values) for name, values in logs.items()},
            **self._predictions(model, is_plain=strategy is None),
        }

    def _predictions(self, model: Any, *, is_plain: bool) -> Results:
        """Returns the predictions for all batches; none if plain Keras cannot predict, either."""
        if not is_plain and "prediction 0" not in self.plain:
            return {}
        inputs = [keras.utils.unpack_x_y_sample_weight(batch)[0] for batch in self.batches]
        try:
            outputs = model.predict(_dataset_of([(x,) for x in inputs]), verbose=0)
        except Exception:  # the model has only a train_step
            if is_plain:
                return {}
            raise
        return {f"prediction {n}": part for n, part in enumerate(keras.tree.flatten(outputs))}


def first_batches(data: Any, batch_size: int | None, steps: int) -> list[Structure]:
    """Returns the first global batches of `(x, y)`, `(x, y, sample_weight)` or a dataset.

    Args:
        batch_size: rows of a batch of arrays. None is 32.
    """
    if isinstance(data, ShardedDataset):
        data = data.dataset(epoch=0)
    x, y, weights = (*(data if isinstance(data, tuple) else (data,)), None, None)[:3]
    dataset = get_data_adapter(x, y, weights, batch_size=batch_size or 32).get_tf_dataset()
    return list(dataset.take(steps))


def _dataset_of(batches: Sequence[Structure]) -> tf.data.Dataset:
    """Returns a dataset of batches, whose number of rows is unknown to TensorFlow."""
    dataset = tf.data.Dataset.from_tensors(batches[0])
    for batch in batches[1:]:
        dataset = dataset.concatenate(tf.data.Dataset.from_tensors(batch))
    return dataset


def _neighbors(values: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Returns the next larger or the next smaller number of each value, at random."""
    ends = np.array([-np.inf, np.inf], values.dtype)
    return np.nextafter(values, random.choice(ends, values.shape))


def _with_neighbors(batch: Structure, random: np.random.Generator) -> Structure:
    """Returns a batch with neighbors of the inputs. Labels stay, because metrics compare them."""

    def neighbors(part: Any) -> Any:
        if not tf.as_dtype(getattr(part, "dtype", tf.int32)).is_floating:
            return part
        return _neighbors(np.asarray(part).astype(keras.config.floatx()), random)

    x, *rest = batch if isinstance(batch, tuple) else (batch,)
    return (tf.nest.map_structure(neighbors, x, expand_composites=True), *rest)


def _values_of(model: keras.Model) -> dict[str, np.ndarray]:
    """Returns the values of all variables by kind and name; NaN where copies are different."""
    values = {}
    trainable = {id(variable) for variable in model.trainable_weights}
    for path, variable in state_of(model).items():
        group, _, name = path.partition("/")
        if group == METRICS:
            continue
        kind = "weight" if id(variable) in trainable else "variable"
        if group != MODEL:
            kind, name = "optimizer", path.removeprefix("optimizer.")
        value = whole_value(variable)
        equal = has_equal_copies(variable)
        values[f"{kind} {name}"] = value if equal else np.full(value.shape, np.nan)
    return values


def relative_differences(results: Results, wanted: Results) -> dict[str, float]:
    """Returns name -> largest difference, relative to the largest number in `wanted`."""
    # Only names of `wanted`: Keras does not make the slots of an optimizer without use.
    differences = dict.fromkeys(wanted, np.inf)
    for name in wanted.keys() & results.keys():
        ours, right = (np.asarray(values[name], "float64") for values in (results, wanted))
        if ours.shape == right.shape:
            finite = np.abs(right[np.isfinite(right)])
            scale = max(SMALLEST_SCALE, float(finite.max(initial=0.0)))
            same = (ours == right) | (np.isnan(ours) & np.isnan(right))
            with np.errstate(invalid="ignore"):
                apart = np.where(same, 0.0, np.abs(ours - right))
            largest = np.nan_to_num(apart, nan=np.inf).max(initial=0.0)
            differences[name] = float(largest) / scale
    return differences
