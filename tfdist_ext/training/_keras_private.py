"""The one place where Keras's private names are used, each with the reason.

`REPLACED` lists the functions of Keras and TensorFlow, private and public, that do something else
while a step runs; `replaced.py` does it. `tests/training/test_keras_private.py` fails with the
name and the reason when a release moves one.
"""

from __future__ import annotations

import contextlib
import pkgutil
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist_ext.errors import TrainingError
from tfdist_ext.private_names import PrivateNames
from tfdist_ext.training.protocols import Logs, Structure

NAMES = PrivateNames(
    "keras.src",
    TrainingError,
    {
        "backend.common.stateless_scope.get_stateless_scope": "the scope of a replica's step",
        "backend.compute_output_spec": "variables of a model that is not compiled",
        "backend.tensorflow.trainer.convert_to_np_if_not_ragged": "the outputs of predict",
        "backend.tensorflow.trainer.potentially_ragged_concat": "the outputs of predict",
        "losses.loss.apply_mask": "what a weighted mean divides by",
        "models.functional.Functional": "cloning a model layer by layer",
        "saving.serialization_lib.SafeModeScope": "cloning objects with lambdas",
        "random.seed_generator.global_seed_generator": "random numbers without a seed",
        "trainers.data_adapters.array_data_adapter.ArrayDataAdapter": "arrays as data",
        "trainers.data_adapters.array_slicing.TensorflowSparseWrapper": "sparse arrays as data",
        "trainers.data_adapters.array_slicing.convert_to_sliceable": "arrays as data",
        "trainers.data_adapters.array_slicing.slice_tensorflow_sparse_wrapper": "sparse arrays",
        "trainers.data_adapters.array_slicing.train_validation_split": "validation_split",
        "trainers.data_adapters.get_data_adapter": "all forms of data",
    },
)


def train_validation_split(arrays: Structure, validation_split: float) -> Any:
    """(the first part of each array, the rest). Private: there is no public function."""
    split = NAMES("trainers.data_adapters.array_slicing.train_validation_split")
    return split(arrays, validation_split=validation_split)


def get_data_adapter(*data: Any, **options: Any) -> Any:
    """Keras's adapter of any data. Private: Keras's checks of data have no public name."""
    return NAMES("trainers.data_adapters.get_data_adapter")(*data, **options)


def in_one_array(*parts: tf.Tensor | np.ndarray) -> np.ndarray | tf.RaggedTensor:
    """The outputs of several batches as one NumPy array, or ragged tensor.

    Private because Keras's predict has no public function that concatenates batches.
    """
    if len(parts) == 1 and isinstance(parts[0], np.ndarray):
        return parts[0]  # Keras's function takes it for a tensor
    concat = NAMES("backend.tensorflow.trainer.potentially_ragged_concat")
    return NAMES("backend.tensorflow.trainer.convert_to_np_if_not_ragged")(concat(list(parts)))


class Replaced(NamedTuple):
    """A function, or a property, that does something else while a step runs.

    Attributes:
        key: its key in a step. Several functions may have the same key.
        path: its module, and its name there, as "keras:losses.Loss.__call__".
        why: what it does in a step, and why it must be replaced.
    """

    key: str
    path: str
    why: str

    def __str__(self) -> str:
        return self.path.replace(":", ".")

    def place(self) -> tuple[type | types.ModuleType, str]:
        """Returns the class or module that holds the function, and its name there.

        Raises:
            ImportError, AttributeError: this release has no such module or class.
        """
        module, _, names = self.path.partition(":")
        owner, _, name = names.rpartition(".")
        try:
            return pkgutil.resolve_name(f"{module}:{owner}"), name
        except ImportError:  # newer releases of Keras have a package for operations
            module = module.replace(".tensorflow.", ".tensorflow.ops.")
            return pkgutil.resolve_name(f"{module}:{owner}"), name


def _replaced(key: str, why: str, *paths: str) -> list[Replaced]:
    return [Replaced(key, path, "the same" if n else why) for n, path in enumerate(paths)]


_OPS = "tensorflow.python.ops"
_STATELESS = f"{_OPS}.gen_stateless_random_ops"
_STATEFUL = f"{_OPS}.gen_random_ops"
_VARIABLE = f"{_OPS}.resource_variable_ops:BaseResourceVariable"
_LAUNCHER = "tensorflow.python.distribute.cross_device_utils:CollectiveReplicaLauncher"


REPLACED = (
    *_replaced(
        "apply",
        "gets the gradients of the global batch, before it clips, accumulates or applies them",
        "keras:optimizers.Optimizer.apply",
        "keras:optimizers.LossScaleOptimizer.apply",
        "keras:optimizers.Optimizer.apply_gradients",
    ),
    *_replaced(
        "gradient",
        "gradients of variables are those of the global batch. At this point the loss is final, so"
        " a loss that is still a vector can be treated as a sum",
        "tensorflow:GradientTape.gradient",
    ),
    *_replaced(
        "loss",
        "Dice and Tversky are ratios of sums over the global batch",
        "keras:losses.Loss.__call__",
    ),
    *_replaced(
        "reduce_loss",
        "a loss over a part counts with the part's share of what the whole sums or divides by."
        " The public `Loss.__call__` gives neither the mask nor the divisor",
        "keras.src.losses.loss:reduce_weighted_values",
    ),
    *_replaced(
        "average_loss",
        "`tf.nn.compute_average_loss` divides by the rows of the global batch. It calls this"
        " function whichever of its own names a step uses",
        f"{_OPS}.losses.util:check_per_example_loss_rank",
    ),
    *_replaced(
        "divide_average_loss", "the same: the division itself", f"{_OPS}.math_ops:div_no_nan"
    ),
    *_replaced(
        "added_loss",
        "Keras sums what a layer gives to add_loss. A sum over a part's rows is no mean",
        "keras:Model._aggregate_additional_loss",
    ),
    *_replaced(
        "clear_losses",
        "replicas share a layer, which keeps the losses of its last call. The losses of another"
        " replica must stay",
        "keras:Layer._clear_losses",
    ),
    *_replaced(
        "update_mean",
        "a single number is the mean over a part, and counts with the part's share",
        "keras:metrics.Mean.update_state",
    ),
    *_replaced(
        "moments",
        "statistics over all replicas. The gradient of Keras's function does not weigh the"
        " replicas, and counts a part of 0 rows",
        "keras.src.backend.tensorflow.nn:_compute_moments_sync",
    ),
    *_replaced(
        "moments_of_layer",
        "the same with a mask, where Keras ignores `synchronized`",
        "keras:layers.BatchNormalization._moments",
    ),
    *_replaced(
        "replicas",
        "is 1 in a step: Keras and users divide a mean loss by it, and the shares do that",
        "tensorflow:distribute.Strategy.num_replicas_in_sync",
    ),
    *_replaced(
        "take",
        "rows of a table that replicas share, or that is in shards, are gathered where they are."
        " Keras makes a tensor of the whole table first",
        "keras.src.backend.tensorflow.numpy:take",
    ),
    *_replaced(
        "draw",
        "draws the rows of one replica's part. All ways of drawing call these operations, which get"
        " the counter from which rows are drawn",
        *(
            f"{_STATELESS}_v2:stateless_{name}_v2"
            for name in (
                *("random_uniform", "random_uniform_int", "random_uniform_full_int"),
                *("random_normal", "truncated_normal"),
            )
        ),
    ),
    *_replaced(
        "draw_with_state",
        "draws a seed, of which each replica has its rows: what shares a trace would draw the same",
        *(
            f"{_STATEFUL}:{name}"
            for name in (
                *("random_uniform", "random_uniform_int"),
                *("random_standard_normal", "truncated_normal"),
            )
        ),
    ),
    *_replaced(
        "draw_by_parameters",
        "the same, for distributions that draw all values of one parameter before the next",
        f"{_STATELESS}_v2:stateless_random_gamma_v3",
        f"{_STATELESS}:stateless_random_binomial",
        f"{_STATELESS}:stateless_random_poisson",
    ),
    *_replaced("draw_categories", "the same, of categories", f"{_STATELESS}:stateless_multinomial"),
    *_replaced(
        "seed_generator",
        "each replica has one, which is made outside of the step",
        "keras.src.random.seed_generator:global_seed_generator",
    ),
    *_replaced(
        "shuffle",
        "rows are shuffled over all replicas",
        "keras.src.backend.tensorflow.random:shuffle",
    ),
    *_replaced(
        "gather",
        "finds rows of other replicas by the numbers that a shuffle gave",
        "tensorflow:gather",
    ),
    *_replaced(
        "write_variable",
        "what a replica writes to a tf.Variable of the user's becomes the mean over all rows",
        *(
            f"{_VARIABLE.replace('Base', '')}.{name}"
            for name in ("assign", "assign_add", "assign_sub")
        ),
        f"{_VARIABLE}._strided_slice_assign",
        f"{_VARIABLE}.batch_scatter_update",
        *(
            f"{_VARIABLE}.scatter_{how}"
            for how in ("add", "div", "max", "min", "mul", "sub", "update")
        ),
        *(f"{_VARIABLE}.scatter_nd_{how}" for how in ("add", "max", "min", "sub", "update")),
    ),
    *_replaced(
        "update_variable",
        "each replica writes its own copy: TensorFlow's function is a cross-replica call, which a"
        " cond cannot contain, and weighs replicas without regard to their rows",
        "tensorflow.python.distribute.values:MirroredVariable._update_replica",
    ),
    *_replaced(
        "update_variable",
        "an error names the variable that replicas share and each would write",
        "tensorflow.python.distribute.ps_values:AggregatingVariable._assign_func",
    ),
    *_replaced(
        "collective_key",
        "all turns of a loop in the graph have one key for a collective: what is gathered may have"
        " several sizes",
        f"{_LAUNCHER}._next_instance_key",
    ),
    *_replaced(
        "reduce_slices",
        "workers know that they have equally many slices: one collective gathers those of all"
        " tables, instead of three for each",
        f"{_LAUNCHER}.all_reduce_indexed_slices",
    ),
)


def loss_ids(layer: keras.Layer) -> set[int]:
    """The ids of the losses that a layer gave to add_loss. Private: they have no public name."""
    return NAMES.of(layer, "_loss_ids", "what layers give to add_loss")


def raw_value(variable: keras.Variable | tf.Variable) -> tf.Variable:  # None if uninitialized
    """The tf.Variable behind a Keras variable, whatever stateless scope is open.

    Private because `.value` asks the open scope first, and the scope asks us.
    """
    if isinstance(variable, tf.Variable):
        return variable
    return NAMES.of(variable, "_value", "variables in a step")


def array_parts(adapter: Any) -> tuple[Structure, int, int] | None:
    """Arrays as tensors, rows and global batch of an adapter; None if it holds no arrays.

    Private because the adapter's own dataset shuffles in an unseeded order, and a cluster needs one
    order for all workers. The adapter's checks and conversions are used.
    """
    if not isinstance(adapter, NAMES("trainers.data_adapters.array_data_adapter.ArrayDataAdapter")):
        return None
    use = "arrays as data"
    inputs = NAMES.of(adapter, "_inputs", use)
    sliceable = NAMES("trainers.data_adapters.array_slicing.convert_to_sliceable")
    parts = sliceable(inputs, target_backend="tensorflow")
    parts = keras.tree.map_structure(
        lambda part: part if part is None or tf.is_tensor(part) else tf.convert_to_tensor(part),
        keras.tree.lists_to_tuples(parts),
    )
    return parts, NAMES.of(adapter, "_num_samples", use), NAMES.of(adapter, "_batch_size", use)


def batches_of(adapter: object) -> Iterator[Structure]:
    """The batches of one pass as the adapter gives them to tf.data.

    Private because the public iterators convert batches to NumPy arrays, or begin again at the end.
    """
    return NAMES.of(adapter, "_get_iterator", "a PyDataset as data")()


def take(parts: Structure, indices: tf.Tensor) -> Structure:
    """The given rows of `parts`, dense or sparse. Private: how Keras slices sparse arrays."""
    slicing = "trainers.data_adapters.array_slicing"

    def rows(part: Any) -> Any:
        if isinstance(part, NAMES(f"{slicing}.TensorflowSparseWrapper")):
            return NAMES(f"{slicing}.slice_tensorflow_sparse_wrapper")(part, indices)
        if isinstance(part, list | tuple | dict):
            return None  # a structure: look inside
        return tf.gather(part, indices) if tf.is_tensor(part) else part

    return keras.tree.traverse(rows, parts)


def symbolic_build(model: keras.Model, batch: Structure) -> None:
    """Build model, metrics, losses and optimizer from the shapes of one batch.

    Private because Keras offers no public way to build metrics before the first step, and
    variables must exist before a step is traced.
    """
    NAMES.of(model, "_symbolic_build", "metrics and optimizers before a step")(data_batch=batch)


def symbolic_call(model: keras.Model, batch: Structure) -> None:
    """Build the model alone, where there are no targets. Private: public ways need real data."""
    if not all(layer.built for layer in flat_layers(model)):
        x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
        NAMES("backend.compute_output_spec")(model, x, training=False)


def call_symbolically(function: Callable[..., Any], *args: Any) -> Any:
    """Trace a function for the variables it makes. Private: public ways trace a model's call."""
    return NAMES("backend.compute_output_spec")(function, *args)


def flat_layers(model: keras.Model | keras.Layer) -> list[keras.Layer]:
    """The model and every layer inside it. Private: the public list has one level only."""
    return list(NAMES.of(model, "_flatten_layers", "layers inside of layers")())


def inner_layers(layer: keras.Layer) -> list[keras.Layer]:
    """The layers directly inside a layer or model. Private: the public list is of models alone."""
    flatten = NAMES.of(layer, "_flatten_layers", "layers inside of layers")
    return list(flatten(recursive=False, include_self=False))


def is_graph_of_layers(model: keras.Model) -> bool:
    """Whether it is Functional or Sequential, and can be cloned layer by layer.

    Private because Keras exports no name for the class of functional models.
    """
    return isinstance(model, keras.Sequential | NAMES("models.functional.Functional"))


def compile_arguments(model: keras.Model) -> dict[str, Any]:
    """The arguments of `compile`, as the live objects: losses may be plain functions."""
    arguments = dict(NAMES.of(model, "_compile_config", "the settings of compile").config)
    arguments["optimizer"] = model.optimizer  # with its loss scaling, where compile added it
    arguments["auto_scale_loss"] = False
    return arguments


def metrics_in_use(model: keras.Model) -> list[keras.metrics.Metric]:
    """The metric objects that the user gave to `compile`, before and after they are built."""
    compiled = NAMES.of(model, "_compile_metrics", use := "the metrics given to compile")
    if compiled is None:
        return []
    given = [NAMES.of(compiled, name, use) for name in ("_user_metrics", "_user_weighted_metrics")]
    return [m for m in keras.tree.flatten(given) if isinstance(m, keras.metrics.Metric)]


def metrics_in_order(model: keras.Model, logs: Logs) -> list[float]:
    """The values of `logs` in the order in which Keras's `evaluate` returns them."""
    return NAMES.of(model, "_flatten_metrics_in_order", "the order of evaluate's results")(logs)


def restored_epoch(model: keras.Model) -> int | None:
    """The epoch that BackupAndRestore found. Private: the callback sets it for Keras's fit."""
    return NAMES.of(model, "_initial_epoch", "BackupAndRestore")


def backup_of(callback: keras.callbacks.BackupAndRestore) -> str:
    """The file of weights. Private: the name of the file in the folder is not public."""
    return str(NAMES.of(callback, "_weights_path", "BackupAndRestore"))


def traces_batches(callback: keras.callbacks.TensorBoard) -> bool:
    """Whether the callback profiles single batches. Private: its argument is not kept."""
    return bool(NAMES.of(callback, "_should_trace", "TensorBoard's profile"))


def remembered_by(callback: keras.callbacks.Callback) -> Sequence[str]:
    """The attributes in which a callback of Keras keeps its state between epochs.

    Private: some attributes of ModelCheckpoint, SwapEMAWeights and TensorBoard.
    """
    return next((names for kind, names in _REMEMBERED.items() if isinstance(callback, kind)), ())


_REMEMBERED: dict[type[keras.callbacks.Callback], Sequence[str]] = {
    keras.callbacks.EarlyStopping: (
        "best", "best_epoch", "best_weights", "stopped_epoch", "wait"
    ),
    keras.callbacks.ReduceLROnPlateau: ("best", "cooldown_counter", "wait"),
    keras.callbacks.ModelCheckpoint: (
        "best", "_batches_seen_since_last_saving", "_last_batch_seen"
    ),
    keras.callbacks.TensorBoard: ("_global_train_batch", "_global_test_batch"),
    keras.callbacks.SwapEMAWeights: ("_ema_weights_in_model",),
    keras.callbacks.History: ("epoch", "history"),
    keras.callbacks.CSVLogger: ("keys",),
}  # fmt: skip


def seed_state() -> np.ndarray | None:
    """The state of `global_seed_generator`; None if nothing was drawn from it yet.

    Private: asking for the generator would make it, which draws a seed from Python's generator.
    """
    found = NAMES("backend.common.global_state.get_global_attribute")("global_seed_generator")
    return None if found is None else found.state.numpy()


def global_seed_generator() -> keras.random.SeedGenerator:
    """The generator that this thread draws from without a seed. Private: Keras makes it itself."""
    return NAMES("random.seed_generator.global_seed_generator")()


def trusted() -> contextlib.AbstractContextManager[None]:
    """A scope in which lambdas may be deserialized: for objects alive in this process only."""
    return NAMES("saving.serialization_lib.SafeModeScope")(safe_mode=False)


def trained_by(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """The variables that an optimizer was built for. Private: there is no public list."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return list(NAMES.of(inner, "_trainable_variables", "the variables of an optimizer"))


@contextlib.contextmanager
def distribution_strategy_of(
    optimizers: Sequence[keras.optimizers.Optimizer], strategy: object
) -> Iterator[None]:
    """Scope in which optimizers work under `strategy`, or an object with its `extended.update`.

    Private because an optimizer keeps the strategy that was current when it was made.
    """
    use = "the update of variables"
    before = [NAMES.of(each, "_distribution_strategy", use) for each in optimizers]
    for optimizer in optimizers:
        optimizer._distribution_strategy = strategy
        # There is nothing to sum. Keras would call TensorFlow's sum over replicas, which registers
        # a gradient, and with it the graph of the step, for the life of the process.
        NAMES.of(optimizer, "_all_reduce_sum_gradients", use)
        vars(optimizer)["_all_reduce_sum_gradients"] = lambda grads_and_vars: grads_and_vars
    try:
        yield
    finally:
        for optimizer, original in zip(optimizers, before, strict=True):
            optimizer._distribution_strategy = original
            vars(optimizer).pop("_all_reduce_sum_gradients", None)


def loss_weights(
    sample_weight: tf.Tensor | None, mask: tf.Tensor | None, reduction: str, dtype: tf.DType | str
) -> tf.Tensor | None:
    """Sample weights and mask as one tensor, by whose sum Keras's reduction divides; or None.

    Private because the reduction does not return its divisor.
    """
    if sample_weight is not None:
        sample_weight = tf.convert_to_tensor(sample_weight, dtype)
    apply_mask = NAMES("losses.loss.apply_mask")
    return apply_mask(sample_weight, mask, dtype=dtype, reduction=reduction)


def stateless_scope() -> keras.StatelessScope | None:
    """The open keras.StatelessScope, or None. Private: no public function returns it."""
    return NAMES("backend.common.stateless_scope.get_stateless_scope")()


def step_variables(
    optimizer: keras.optimizers.Optimizer,
) -> tuple[keras.Variable, keras.Variable | None]:
    """(the variable that counts steps, that of the learning rate, or None under a schedule).

    Private because `iterations` and `learning_rate` give values computed from them.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    rate = NAMES.of(inner, "_learning_rate", use := "steps on parameter servers")
    return NAMES.of(inner, "_iterations", use), rate if isinstance(rate, keras.Variable) else None
