"""tfd.verify: the same training in plain Keras on one device and on a strategy, compared.

Each probable cause of a difference has an experiment: the same training with another setting, or
the loss of plain Keras on other batches.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist_ext.data.pipelines import Structure, batch_size_of, rows_between
from tfdist_ext.data.sharded import ShardedDataset
from tfdist_ext.errors import TfDistError, TrainingError
from tfdist_ext.messages import shown
from tfdist_ext.strategies.owned_sums import owned_sums_of
from tfdist_ext.training._keras_private import get_data_adapter, uses_keras_step
from tfdist_ext.training.building.build import batch_normalization_layers
from tfdist_ext.training.model import check_counts, distribute
from tfdist_ext.training.state import (
    METRICS,
    MODEL,
    has_equal_copies,
    state_of,
    whole_slots,
    whole_value,
)
from tfdist_ext.training.synchronous.reduction import SynchronousReduction
from tfdist_ext.training.verification import Results, Verification, relative_differences
from tfdist_ext.user_frames import filter_traceback

__all__ = ["Trainings", "verify"]

_SEED = 1337

_ORDER = (
    "The data function returns different batches when it is called again, so two workers would"
    " train on different data. Seed shuffle() and all random numbers in the function."
)
_RANDOM = (
    "The model draws random numbers from np.random, or from another source that Keras does not"
    " seed. Replicas do not share these numbers (rule 6). Draw from keras.random with a"
    " keras.random.SeedGenerator."
)
_BATCH_NORM = (
    "BatchNormalization normalizes the rows of each replica separately (rule 5). Pass"
    " synchronize_batch_norm=True to tfd.distribute to normalize over the global batch."
)
_SUM = (
    "The loss is a sum over rows, or a sum divided by a constant such as the batch size (rule 2)."
    " Return one loss per row, or take tf.reduce_mean over the rows."
)
_RATIO = (
    "The loss is a ratio of two sums over rows, such as a masked mean. Each replica divides its own"
    " sums (rule 2). Call tfd.all_rows on the losses and the mask first, or return one loss per"
    " row with a sample weight."
)
_PAIRS = (
    "The loss compares rows with each other, such as in-batch negatives. Each replica sees only its"
    " own rows (rule 7). Call tfd.all_rows on the features before they are compared."
)
_VARIABLE = (
    "A step writes a value that depends on its rows, such as a count, to {} (rule 5). Compute the"
    " value from tfd.all_rows, so that all replicas write the same, or count in a Keras metric."
)
_METRIC = (
    "The metric {} is not made of sums over rows: it averages one number per batch (rule 4)."
    " Add up numerator and denominator in two variables, and divide in result()."
)
_COPIES = (
    "The replicas' copies of {} are different, because an update is not the same on all replicas."
    " It may draw random numbers outside of TensorFlow, or use the ID of the replica."
)
_UNKNOWN = (
    'No experiment found the cause. See "What the rules do not cover" in docs/exactness.md. If all'
    " differences are below 1e-4, they may be rounding: pass tolerance=1e-4 (--tolerance 1e-4)."
)


@filter_traceback
def verify(
    builder: Callable[[], keras.Model],
    data: Any,
    strategy: tf.distribute.Strategy,
    *,
    steps: int = 3,
    tolerance: float = 1e-5,
    synchronize_batch_norm: bool | None = None,
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
        strategy: a synchronous strategy.
        steps: the number of global batches per epoch. Both trainings use the first batches, in the
            same order.
        tolerance: the largest relative difference that counts as equal. A larger difference also
            counts as equal if rounding explains it. To estimate rounding, `verify` trains plain
            Keras again with the last bits of weights and inputs changed. Rounding explains up to
            100 times the difference between both trainings.
        synchronize_batch_norm: the argument of `tfd.distribute`.
        fit: other arguments of `fit`, such as `batch_size` (global), `epochs` and
            `validation_data`. Arrays are not shuffled. Each training gets a copy of the callbacks.

    Returns:
        A `Verification`, to be printed.

    Raises:
        TrainingError: the strategy trains asynchronously, `builder` is not a function, the data
            contains no batch, or `validation_split` is passed.
    """
    if isinstance(strategy, tf.distribute.ParameterServerStrategy):
        raise TrainingError(
            "verify cannot compare parameter servers with one device, because they train"
            ' asynchronously. Verify the model with create_strategy("mirrored", logical_cpus=4).'
        )
    with warnings.catch_warnings():
        warnings.simplefilter("default", UserWarning)  # no warning of a training is an error
        trainings = Trainings(builder, data, steps, fit, synchronize_batch_norm)
        title = (
            f"{type(strategy).__name__} with {strategy.num_replicas_in_sync} replicas, compared"
            " with plain Keras on one device. Rows in the global batches:"
            f" {str(trainings.rows)[1:-1]}."
        )
        result = Verification(title, {}, {}, tolerance)
        try:
            differences = trainings.differences(strategy)
        except TfDistError as error:
            result = replace(result, error=str(error))
            differences = _differences_of_refused(trainings, strategy)
        if trainings.order_changes:
            differences["data first batch"] = float("inf")
        result = replace(result, differences=differences)
        if result.unequal:
            result = replace(result, rounding=trainings.differences(last_bit=True))
        if result.unequal and not result.error:
            result = replace(result, causes=list(_probable_causes(trainings, strategy, result)))
        return result


def _differences_of_refused(
    trainings: Trainings, strategy: tf.distribute.Strategy
) -> dict[str, float]:
    """Returns the differences of refused steps that run eagerly; {} if they cannot.

    Rows in a variable are found in the graph of a step, and an eager step has no graph.
    """
    with contextlib.suppress(Exception):
        # After an error the other workers may be elsewhere.
        if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
            return trainings.differences(strategy, eagerly=True)
    return {}


def _probable_causes(
    trainings: Trainings, strategy: tf.distribute.Strategy, result: Verification
) -> Iterator[str]:
    """Yields the causes that experiments find, with their remedies."""

    def unequal(*args: Any, **options: Any) -> list[str]:
        differences = trainings.differences(*args, **options)
        return [name for name, value in differences.items() if value > result.allowed(name)]

    if trainings.order_changes:
        yield _ORDER
    names = [name for name in result.unequal if not name.startswith("data ")]
    if not names:
        return
    if trainings.unequal_copies:
        yield _COPIES.format(shown(sorted(trainings.unequal_copies)))
        return
    if unequal(numpy_seed=7331):
        yield _RANDOM
        return
    layers = batch_normalization_layers(trainings.new_model())
    if any(not layer.synchronized for layer in layers):
        remaining = unequal(strategy, synchronize_batch_norm=True)
        if len(remaining) < len(names):
            yield _BATCH_NORM
            names = remaining
    if names:
        yield from _causes_by_place(names, trainings) or [_UNKNOWN]


def _causes_by_place(unequal: list[str], trainings: Trainings) -> list[str]:
    """Returns causes by what differs: trained weights, other variables, or only logs."""
    names: dict[str, list[str]] = {"weight": [], "variable": [], "log": []}
    for kind, _, name in (each.partition(" ") for each in unequal):
        names.setdefault(kind, []).append(name)
    causes = [_VARIABLE.format(name) for name in names["variable"]]
    if names["weight"]:
        # A custom step may refuse other batches.
        with contextlib.suppress(Exception):
            causes = [*_causes_in_loss(trainings), *causes]
    elif metrics := [name for name in names["log"] if not name.endswith("loss")]:
        causes.append(_METRIC.format(", ".join(metrics)))
    return causes


def _causes_in_loss(trainings: Trainings) -> Iterator[str]:
    """Tells the kind of a loss by its value for a batch, its rows twice, and its halves."""
    batch, rows = trainings.batches[0], trainings.rows[0]
    half = rows // 2
    if not half:
        return

    def loss_of(*batches: Structure) -> float:
        model, data = trainings.new_model(), _dataset_of(batches).unbatch().batch(2 * rows)
        if uses_keras_step(model, "train"):  # evaluate has no dropout
            return float(model.evaluate(data, verbose=0, return_dict=True)["loss"])
        return float(model.fit(data, verbose=0).history["loss"][0])

    whole, doubled = loss_of(batch), loss_of(batch, batch)
    first, second = loss_of(rows_between(batch, 0, half)), loss_of(rows_between(batch, half, rows))
    if not _close(doubled, whole):
        yield _SUM if _close(doubled, 2 * whole) else _PAIRS
    elif not _close((half * first + (rows - half) * second) / rows, whole):
        yield _RATIO


def _close(a: float, b: float) -> bool:
    return bool(np.isclose(a, b, rtol=1e-3, atol=1e-6))


class Trainings:
    """Trainings of one model on the same data, each from new variables and the same seeds.

    Args:
        builder: creates the compiled model.
        data: arrays (x, y) or (x, y, sample_weight), a dataset, or a function that returns one.
        steps: global batches to train on.
        fit: arguments of `fit`.
        synchronize_batch_norm: as of `tfd.distribute`.

    Attributes:
        batches: the global batches of one epoch; the last one is smaller.
        rows: the number of rows of each batch.
        order_changes: whether the data function returns another first batch when called again.
        unequal_copies: names of variables that have had different copies after a training.
    """

    def __init__(
        self,
        builder: Callable[[], keras.Model],
        data: Any,
        steps: int,
        fit: Mapping[str, Any],
        synchronize_batch_norm: bool | None,
    ):
        if isinstance(builder, keras.Model) or not callable(builder):
            raise TrainingError(
                f"verify creates the model several times, so it needs a function, got {builder!r}."
            )
        self._builder = builder
        self._synchronize_batch_norm = synchronize_batch_norm
        self._fit = {"verbose": 0, "shuffle": False, **fit}
        check_counts(batch_size=self._fit.get("batch_size"), steps=steps)
        if self._fit.get("validation_split"):
            raise TrainingError(
                "verify does not take validation_split, because it trains on a few batches. Pass"
                " validation_data."
            )
        made = data() if callable(data) else data
        self.batches = self._read(made, steps)
        if not self.batches:
            raise TrainingError("The data passed to verify is empty: it has no batch.")
        self.order_changes = False
        self.unequal_copies: set[str] = set()
        # A dataset is not compared with itself: a seeded shuffle has a new order in each iteration.
        if callable(data) and (again := data()) is not made:
            first = self._read(again, 1)
            self.order_changes = not first or _bytes_of(self.batches[0]) != _bytes_of(first[0])
        self.rows = [int(batch_size_of(batch)) for batch in self.batches]
        if self.rows[-1] == self.rows[0]:  # parts of different sizes show more
            self.rows[-1] -= self.rows[0] // 2
            self.batches[-1] = rows_between(self.batches[-1], 0, self.rows[-1])

    def new_model(self) -> keras.Model:
        """Returns a new model of plain Keras, from the seeds of all trainings."""
        keras.utils.set_random_seed(_SEED)
        return self._builder()

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
        synchronize_batch_norm: bool = False,
        last_bit: bool = False,
        numpy_seed: int = _SEED,
        eagerly: bool = False,
    ) -> Results:
        """Trains in plain Keras or on a strategy; returns all numbers by kind and name.

        Args:
            synchronize_batch_norm: turn it on.
            last_bit: change the last bits of the initial weights and of the inputs.
            numpy_seed: the seed of `np.random` when the training starts.
            eagerly: do not compile the steps.
        """
        build: Callable[[], Any] = self._builder
        if strategy is not None:
            wanted = synchronize_batch_norm or self._synchronize_batch_norm
            build = functools.partial(distribute, build, strategy, synchronize_batch_norm=wanted)
        keras.utils.set_random_seed(_SEED)
        model = build()
        inner = getattr(model, "keras_model", model)
        if strategy is None and self._synchronize_batch_norm:
            # The other formula of a synchronized layer is more exact, on one device, too.
            for layer in batch_normalization_layers(inner):
                layer.synchronized = True
        inner.run_eagerly = inner.run_eagerly or eagerly
        batches = self.batches
        if last_bit:
            random = np.random.default_rng(_SEED)
            for weight in inner.trainable_weights:
                weight.assign(_neighbors(weight.numpy(), random))
            batches = [_with_neighbors(batch, random) for batch in batches]
        keras.utils.set_random_seed(_SEED)
        np.random.seed(numpy_seed)
        callbacks = copy.deepcopy(self._fit.get("callbacks"))  # some cannot be used twice
        logs = model.fit(_dataset_of(batches), **{**self._fit, "callbacks": callbacks}).history
        whole: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if strategy is not None and owned_sums_of(strategy) is not None:
            whole = whole_slots(SynchronousReduction(strategy), inner, everywhere=True)
        with whole:
            of_variables = self._values_of(inner)
        return {
            **of_variables,
            **{f"log {name}": np.asarray(values) for name, values in logs.items()},
            **self._predictions(model, is_plain=strategy is None),
        }

    def _read(self, data: Any, steps: int) -> list[Structure]:
        """Returns the first global batches."""
        if isinstance(data, ShardedDataset):
            data = data.dataset(epoch=0)
        x, y, weights = (*(data if isinstance(data, tuple) else (data,)), None, None)[:3]
        size = self._fit.get("batch_size") or 32
        dataset = get_data_adapter(x, y, weights, batch_size=size).get_tf_dataset()
        return list(dataset.take(steps))

    def _values_of(self, model: keras.Model) -> dict[str, np.ndarray]:
        """Returns the values of all variables by kind and name; NaN where copies are different."""
        values = {}
        for name, variable in _variables_of(model).items():
            values[name] = whole_value(variable)
            if not has_equal_copies(variable):
                self.unequal_copies.add(name)
                values[name] = np.full(values[name].shape, np.nan)
        return values

    def _predictions(self, model: Any, *, is_plain: bool) -> Results:
        """Returns the predictions for all batches; none if plain Keras cannot predict, either."""
        inputs = [keras.utils.unpack_x_y_sample_weight(batch)[0] for batch in self.batches]
        try:
            outputs = model.predict(_dataset_of([(x,) for x in inputs]), verbose=0)
        except TfDistError:
            raise
        except Exception:  # the model has only a train_step
            if is_plain or not any(name.startswith("prediction ") for name in self.plain):
                return {}
            raise
        return {f"prediction {n}": part for n, part in enumerate(keras.tree.flatten(outputs))}


def _bytes_of(batch: Structure) -> list[bytes]:
    parts = tf.nest.flatten(batch, expand_composites=True)
    return [tf.io.serialize_tensor(part).numpy() for part in parts if part is not None]


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


def _variables_of(model: keras.Model) -> dict[str, keras.Variable | tf.Variable]:
    """Returns all variables of a model and its optimizers, by kind and name."""
    variables: dict[str, keras.Variable | tf.Variable] = {}
    trainable = {id(variable) for variable in model.trainable_weights}
    for path, variable in state_of(model).items():
        group, _, name = path.partition("/")
        if group == MODEL:
            kind = "weight" if id(variable) in trainable else "variable"
            variables[f"{kind} {name}"] = variable
        elif group != METRICS:
            variables[f"optimizer {path.removeprefix('optimizer.')}"] = variable
    return variables
