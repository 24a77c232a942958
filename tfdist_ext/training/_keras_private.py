"""The one place of `training/` where Keras's private names are used, each with the reason.

`REPLACED` lists the functions of Keras and TensorFlow, private and public, that do something else
while a step is traced. Keras's losses, layers and optimizers call each other, and
user code calls them directly, so there is no other way to change what they do. `substitutes` says
what they do in a thread; other threads get the originals.

`tests/training/test_keras_private.py` fails with the name and the reason when a release moves one.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import pkgutil
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from tfdist_ext.data.pipelines import Structure
from tfdist_ext.errors import TrainingError
from tfdist_ext.private_names import PrivateNames
from tfdist_ext.user_frames import warn

NAMES = PrivateNames(
    "keras.src",
    TrainingError,
    {
        "backend.common.global_state.get_global_attribute": "random numbers without a seed",
        "backend.common.global_state.set_global_attribute": "random numbers without a seed",
        "backend.common.stateless_scope.get_stateless_scope": "the scope of a replica's step",
        "backend.compute_output_spec": "variables of a model that is not compiled",
        "backend.tensorflow.trainer.convert_to_np_if_not_ragged": "the outputs of predict",
        "backend.tensorflow.trainer.potentially_ragged_concat": "the outputs of predict",
        "models.functional.Functional": "the inputs of an exported model",
        "random.seed_generator.global_seed_generator": "random numbers without a seed",
    },
)


def in_one_array(*parts: tf.Tensor | np.ndarray) -> np.ndarray | tf.RaggedTensor:
    """Concatenates the outputs of several batches, as Keras's predict does."""
    if len(parts) == 1 and isinstance(parts[0], np.ndarray):
        return parts[0]  # Keras's function would treat the array as a tensor
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
        except ImportError:  # Keras 3.16 has a package for operations
            module = module.replace(".tensorflow.", ".tensorflow.ops.")
            return pkgutil.resolve_name(f"{module}:{owner}"), name


_OPS = "tensorflow.python.ops"
_VARIABLES = f"{_OPS}.resource_variable_ops"
_LAUNCHER = "tensorflow.python.distribute.cross_device_utils:CollectiveReplicaLauncher"

# Key -> what the function does in a step, paths. The functions are in `exact.substitutes_of`,
# `random_numbers.RANDOM`, `ReplicaSums.keys_of_size`, `OptimizerParts` and
# parameter_server/scope.py.
_REPLACED = {
    "apply": (
        "gets the gradients of the global batch, before it clips, accumulates or applies them",
        "keras:optimizers.Optimizer.apply",
        "keras:optimizers.LossScaleOptimizer.apply",
    ),
    "gradient": (
        "returns the gradient of the global batch; only here is the shape of the loss known",
        "tensorflow:GradientTape.gradient",
    ),
    "vectorize": (
        "computes the gradients of single rows in `tape.jacobian` and `tf.vectorized_map`",
        f"{_OPS}.parallel_for.control_flow_ops:_pfor_impl",
    ),
    "loss": (
        "computes Dice and Tversky, ratios of sums, from the rows of all replicas",
        "keras:losses.Loss.__call__",
    ),
    "reduce_loss": (
        "weighs a loss by the part's share of the divisor, which no public function returns",
        "keras.src.losses.loss:reduce_weighted_values",
    ),
    "average_loss": (
        "divides by the rows of all parts",
        "tensorflow:nn.compute_average_loss",
        "tensorflow:compat.v1.nn.compute_average_loss",
        "tensorflow:compat.v2.nn.compute_average_loss",
    ),
    "added_loss": (
        "sums the losses from add_loss; a sum over the rows of a part is not a mean",
        "keras:Model._aggregate_additional_loss",
    ),
    "clear_losses": (
        "keeps the losses of other replicas, which share the layer",
        "keras:Layer._clear_losses",
    ),
    "update_mean": (
        "counts a single number, the mean over a part, with the part's share",
        "keras:metrics.Mean.update_state",
        "keras:metrics.Sum.update_state",
    ),
    "moments": (
        "weights replicas by their rows, also in the gradient, and applies the mask",
        "keras:layers.BatchNormalization._moments",
    ),
    "replicas": (
        "is 1: Keras and users divide a mean loss by it, but gradients are weighted already",
        "tensorflow:distribute.Strategy.num_replicas_in_sync",
    ),
    "take": (
        "gathers rows of a shared table on its device; Keras copies the table first",
        "keras.src.backend.tensorflow.numpy:take",
    ),
    "cond": (
        "lets both branches of an optimizer's update write the parts of `shard_optimizer=True`",
        "keras.src.backend.tensorflow.core:cond",
    ),
    "add": (
        "adds parts without rows; Keras takes a matrix without rows for a bias",
        "keras.src.backend.tensorflow.numpy:add",
    ),
    "clip": (
        "clips by the norms of whole gradients under `shard_optimizer=True`",
        "keras:optimizers.Optimizer._clip_gradients",
    ),
    "check_finite": (
        "checks the gradients of all workers under `shard_optimizer=True`",
        "keras:optimizers.LossScaleOptimizer.check_finite",
    ),
    "draw": (
        "creates all operations; those in `random_numbers.RANDOM` draw the rows of the part",
        "tensorflow.python.framework.op_def_library:_apply_op_helper",
    ),
    "shuffle": (
        "shuffles the rows of all replicas",
        "keras.src.backend.tensorflow.random:shuffle",
    ),
    "gather": (
        "finds rows of other replicas by the indices that a shuffle returned",
        "tensorflow:gather",
    ),
    "write_variable": (
        "averages over all rows what a replica assigns to a tf.Variable of the user",
        f"{_VARIABLES}:BaseResourceVariable._lazy_read",
        f"{_VARIABLES}:ResourceVariable.assign",
        f"{_VARIABLES}:ResourceVariable.assign_add",
        f"{_VARIABLES}:ResourceVariable.assign_sub",
    ),
    "update_variable": (
        "writes the replica's own copy, also in a cond",
        "tensorflow.python.distribute.values:MirroredVariable._update_replica",
        "tensorflow.python.distribute.ps_values:AggregatingVariable._assign_func",
    ),
    "collective_key": (
        "returns one key per size; TensorFlow uses one key for all iterations of a loop",
        f"{_LAUNCHER}._next_instance_key",
    ),
}

REPLACED = tuple(
    Replaced(key, path, "the same" if number else why)
    for key, (why, *paths) in _REPLACED.items()
    for number, path in enumerate(paths)
)


def not_called(key: str) -> TrainingError:
    """Returns the error of a step that did not call the functions of a key."""
    functions = [replaced for replaced in REPLACED if replaced.key == key]
    names = " or ".join(str(replaced) for replaced in functions)
    return TrainingError(
        f"The step did not call {names}, which {functions[0].why}. Keras {keras.__version__} with"
        f" TensorFlow {tf.__version__} computes this another way, so the training would be wrong."
        " Install versions that docs/compatibility.md lists as tested, or a newer tfdist_ext."
    )


# A function of Keras or TensorFlow, as its replacement gets it.
Original: TypeAlias = Callable[..., Any]


class Target(NamedTuple):
    """A function, or a property, that can be replaced.

    Attributes:
        key: its key in `substitutes`. Several functions may do the same job.
        owner: the class or module that defines it.
        name: its attribute there.
    """

    key: str
    owner: type | types.ModuleType
    name: str


class _Step(threading.local):
    """The substitutes that are active in this thread, as `substitute(original, *args)`.

    Their keys are those of targets, and types of operations.
    """

    substitutes: Mapping[str, Callable[..., Any] | None] = MappingProxyType({})
    called: set[str] | None = None  # keys; None: not recorded


_step = _Step()


_lock = threading.RLock()  # Ctrl-C may come, and leave a scope, while this thread has it


# The original of each target that is replaced now, and by how many scopes.
_originals: dict[Target, tuple[Any, int]] = {}


@contextlib.contextmanager
def substitutes(
    functions: Mapping[str, Callable[..., Any] | None] | None, called: set[str] | None = None
) -> Iterator[None]:
    """Scope in which this thread calls substitutes in place of the originals.

    Args:
        functions: by the key of a target, or by the type of an operation, functions that get the
            original and its arguments. They are added to those of the scope around this one. None
            removes all substitutes.
        called: receives the keys of the substitutes that are called. By default they go where
            those of the scope around this one go.
    """
    before = _step.substitutes, _step.called
    _step.substitutes = {} if functions is None else {**_step.substitutes, **functions}
    _step.called = _step.called if called is None else called
    try:
        yield
    finally:
        _step.substitutes, _step.called = before


@contextlib.contextmanager
def replacing(targets: Sequence[Target]) -> Iterator[None]:
    """Scope in which the targets call the substitutes of the current thread.

    Several threads may be in it. When the last one leaves, the originals are back.
    """
    with contextlib.ExitStack() as stack:
        for target in targets:
            stack.enter_context(_replaced(target))
        yield


@contextlib.contextmanager
def _replaced(target: Target) -> Iterator[None]:
    key, owner, name = target
    with _lock:
        original, users = _originals.get(target, (vars(owner)[name], 0))
        _originals[target] = original, users + 1
        if not users:
            setattr(owner, name, _dispatching(key, original))
    try:
        yield
    finally:
        with _lock:
            original, users = _originals.pop(target)
            if users > 1:
                _originals[target] = original, users - 1
            else:
                setattr(owner, name, original)


@functools.cache
def step_targets() -> list[Target]:
    """The targets of a step: the functions of `REPLACED` that exist in this release."""
    found = []
    for replaced in REPLACED:
        with contextlib.suppress(ImportError, AttributeError):
            found.append(target_of(replaced.key, *replaced.place()))
    return found


def target_of(key: str, owner: type | types.ModuleType, name: str) -> Target:
    """Returns the target of a function of a module or a class, which may inherit it.

    Raises:
        AttributeError: the owner has no such function.
    """
    for each in inspect.getmro(owner) if isinstance(owner, type) else [owner]:
        if name in vars(each):
            return Target(key, each, name)
    raise AttributeError(f"{owner!r} has no {name!r}")


def _dispatching(key: str, original: Any) -> Any:
    """Returns a function or a property that calls the substitute of this thread."""
    if isinstance(original, property):
        return property(_dispatching(key, original.fget))

    @functools.wraps(original)
    def dispatch(*args: Any, **kwargs: Any) -> Any:
        # The first argument of the function that creates operations is their type.
        substitute = _step.substitutes.get(args[0] if key == "draw" else key)
        if substitute is None:
            return original(*args, **kwargs)
        if _step.called is not None:
            _step.called.add(key)
        return substitute(original, *args, **kwargs)

    return dispatch


def method_of_user(model: keras.Model, name: str) -> Any:
    """Returns a method as the user's class has it, without what `distribute` has inserted."""
    if name in vars(model) or type(model) is model.__class__:
        return getattr(model, name)
    return getattr(super(type(model), model), name)


def uses_keras_step(model: keras.Model, kind: str) -> bool:
    """Whether a "train", "test" or "predict" step is the one that Keras's own models have."""
    step = method_of_user(model, f"{kind}_step")
    return getattr(step, "__func__", None) is getattr(keras.Model, f"{kind}_step")


def overrides(model: keras.Model, name: str) -> bool:
    """Whether a model's class has its own method of this name, and not that of `keras.Model`."""
    return getattr(model.__class__, name) is not getattr(keras.Model, name)


def step_of(model: keras.Model, kind: str) -> Callable[..., Any]:
    """Returns the model's "train", "test" or "predict" step."""
    step = method_of_user(model, f"{kind}_step")
    # Replicas cannot communicate inside the separate graph of a user's tf.function.
    if getattr(step, "_jit_compile", None):
        warn(
            f"jit_compile=True of the tf.function {kind}_step is ignored: fit compiles the step."
            " Pass jit_compile=True to compile()."
        )
    return getattr(step, "python_function", step)


def loss_ids(layer: keras.Layer) -> set[int]:
    """The ids of the losses that a layer gave to add_loss. Private: they have no public name."""
    return NAMES.of(layer, "_loss_ids", "losses from add_loss")


def raw_value(variable: keras.Variable | tf.Variable) -> tf.Variable:  # None if uninitialized
    """The tf.Variable behind a Keras variable. Private: `.value` asks the open scope first."""
    if isinstance(variable, tf.Variable):
        return variable
    return NAMES.of(variable, "_value", "variables in a step")


def set_raw_value(variable: keras.Variable, value: tf.Variable, shape: tuple[int, ...]) -> None:
    """Gives a Keras variable another tf.Variable. Private: a part becomes a whole slot."""
    variable._value, variable._shape = value, shape


def is_watched(variable: keras.Variable) -> bool:
    """Whether tapes watch the value of a variable; those of Keras ask for `trainable` when made."""
    value: Any = raw_value(variable)
    return bool(getattr(value, "trainable", variable.trainable))  # a value in pieces does not say


def initialize_again(variable: keras.Variable, initializer: Callable[..., Any]) -> None:
    """Creates the value of a variable again, in the current scope. Private: Keras does it once.

    Tapes watch the new value if they have watched the old one. A layer may be frozen meanwhile.
    """
    initialize = NAMES.of(variable, "_initialize_with_initializer", "variables of a strategy")
    trainable = variable.trainable
    variable.trainable = is_watched(variable)
    try:
        initialize(initializer)
    finally:
        variable.trainable = trainable


def key_of(variable: Any) -> str:
    """The key by which optimizers know a variable. Private: a name of its tf.Variable."""
    return NAMES.of(keras.optimizers.Optimizer, "_var_key", "the slots of a variable")(
        None, variable
    )


def keys_of(
    optimizers: Sequence[keras.optimizers.Optimizer], variables: Sequence[keras.Variable]
) -> list[str]:
    """The keys by which optimizers know variables; none without an optimizer."""
    known = [each for each in variables if raw_value(each) is not None] if optimizers else []
    return list(map(key_of, known))


def set_strategy(
    optimizers: Sequence[keras.optimizers.Optimizer], strategy: object, keys: Mapping[str, str]
) -> None:
    """Tells optimizers that their variables have moved to a strategy.

    Private because an optimizer keeps the strategy that was current when it was created, and knows
    its variables by keys: for slots, for weight decay, and in a `MultiOptimizer`.

    Args:
        keys: old key of a variable -> new key; see `keys_of`.
    """
    for optimizer in optimizers:
        optimizer._distribution_strategy = strategy
        for name, value in list(vars(optimizer).items()):
            if not isinstance(value, dict | set) or keys.keys().isdisjoint(value):
                continue
            # New ones: TensorFlow cannot save one from which something was deleted.
            if isinstance(value, set):
                setattr(optimizer, name, {keys.get(key, key) for key in value})
            else:
                items = {keys.get(key, key): item for key, item in value.items()}
                setattr(optimizer, name, items)


def symbolic_build(model: keras.Model, batch: Structure) -> None:
    """Build model, metrics, losses and optimizer. Private: Keras builds metrics in a step.

    Keras calls the model as in a test. A model that fails there may still train, such as one with
    RandomCrop before Flatten.
    """
    build = NAMES.of(model, "_symbolic_build", "metrics and optimizers before a step")
    try:
        build(data_batch=batch)
    except ValueError:

        def call(original: Original, *args: Any, **named: Any) -> Any:
            return original(*args, **{**named, **({"training": True} if named else {})})

        with replacing([target_of("call", type(model), "call")]), substitutes({"call": call}):
            build(data_batch=batch)


def call_symbolically(function: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """Trace a function for the variables it makes. Private: public ways need real data."""
    return NAMES("backend.compute_output_spec")(function, *args, **named)


def flat_layers(model: keras.Model | keras.Layer, **options: bool) -> list[keras.Layer]:
    """The model and every layer inside it. Private: the public list has one level only.

    Args:
        options: `recursive` and `include_self`, both True.
    """
    return list(NAMES.of(model, "_flatten_layers", "layers inside of layers")(**options))


def layers_of(model: keras.Model, kind: Any) -> list[Any]:
    """The layers of a class, also in inner models and wrappers; maybe the model itself."""
    return [layer for layer in flat_layers(model) if isinstance(layer, kind)]


def seed_generators(layer: keras.Layer) -> list[keras.random.SeedGenerator]:
    """The generators that a layer itself draws from. Private: layers have no public list."""
    return list(NAMES.of(layer, "_seed_generators", "random numbers of layers"))


def is_graph_of_layers(model: keras.Model) -> bool:
    """Whether a model is Functional or Sequential: its config has its layers.

    Private because Keras exports no name for the class of functional models.
    """
    return isinstance(model, keras.Sequential | NAMES("models.functional.Functional"))


def compile_arguments(model: keras.Model) -> dict[str, Any]:
    """The arguments of `compile`, as the live objects: losses may be plain functions."""
    arguments = dict(NAMES.of(model, "_compile_config", "the settings of compile").config)
    arguments["optimizer"] = model.optimizer  # with its loss scaling, where compile added it
    arguments["auto_scale_loss"] = False
    return arguments


def metrics_in_order(model: keras.Model, logs: dict[str, Any]) -> list[float]:
    """The values of `logs` in the order in which Keras's `evaluate` returns them."""
    return NAMES.of(model, "_flatten_metrics_in_order", "the order of evaluate's results")(logs)


def traces_batches(callback: keras.callbacks.TensorBoard) -> bool:
    """Whether the callback profiles single batches. Private: its argument is not kept."""
    return bool(NAMES.of(callback, "_should_trace", "TensorBoard's profile"))


def remembered_by(callback: keras.callbacks.Callback) -> Sequence[str]:
    """Returns the attributes in which a callback of Keras keeps its state."""
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
if hasattr(keras.callbacks, "OrbaxCheckpoint"):  # Keras 3.15
    _REMEMBERED[keras.callbacks.OrbaxCheckpoint] = (
        "best", "_batches_seen_since_last_saving", "_last_batch_seen", "_total_batches_seen"
    )  # fmt: skip


_SEEDS = "global_seed_generator"


def seed_state() -> np.ndarray | None:
    """The state of `global_seed_generator`; None if none was made, which would draw a seed."""
    found = NAMES("backend.common.global_state.get_global_attribute")(_SEEDS)
    return None if found is None else found.state.numpy()


def global_seed_generator() -> keras.random.SeedGenerator:
    """The generator that this thread draws from without a seed. Private: Keras makes it itself."""
    return NAMES("random.seed_generator.global_seed_generator")()


@contextlib.contextmanager
def drawing_from(generator: keras.random.SeedGenerator) -> Iterator[None]:
    """Scope in which this thread draws from `generator` without a seed.

    Private because Keras keeps the generator in an attribute of the thread.
    """
    set_attribute = NAMES("backend.common.global_state.set_global_attribute")
    before = NAMES("backend.common.global_state.get_global_attribute")(_SEEDS)
    set_attribute(_SEEDS, generator)
    try:
        yield
    finally:
        set_attribute(_SEEDS, before)


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
        # TensorFlow's sum over replicas would keep the graph of the step for the process's life.
        NAMES.of(optimizer, "_all_reduce_sum_gradients", use)
        vars(optimizer)["_all_reduce_sum_gradients"] = lambda grads_and_vars: grads_and_vars
    try:
        yield
    finally:
        for optimizer, original in zip(optimizers, before, strict=True):
            optimizer._distribution_strategy = original
            vars(optimizer).pop("_all_reduce_sum_gradients", None)


def stateless_scope() -> keras.StatelessScope | None:
    """The open keras.StatelessScope, or None. Private: no public function returns it."""
    return NAMES("backend.common.stateless_scope.get_stateless_scope")()


def step_variables(
    optimizer: keras.optimizers.Optimizer,
) -> tuple[keras.Variable, keras.Variable | None]:
    """(the variable that counts steps, that of the learning rate, or None under a schedule)."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    rate = NAMES.of(inner, "_learning_rate", use := "steps on parameter servers")
    return NAMES.of(inner, "_iterations", use), rate if isinstance(rate, keras.Variable) else None


def optimizer_builds() -> list[Target]:
    """The `build` methods of all optimizers. Private: their bases have no public name."""
    found, waiting = {}, [keras.optimizers.Optimizer]
    while waiting:
        kind = waiting.pop()
        waiting += kind.__subclasses__()
        target = target_of("build", kind, "build")
        found[target.owner] = target
    return list(found.values())


@contextlib.contextmanager
def building_again(optimizers: Sequence[keras.optimizers.Optimizer]) -> Iterator[None]:
    """Scope of the second build of optimizers. Its variables replace those of the first build.

    Private because Keras builds an optimizer once, and appends the variables to one list.
    """
    before = [len(NAMES.of(each, "_variables", "the slots of optimizers")) for each in optimizers]
    yield
    for optimizer, size in zip(optimizers, before, strict=True):
        variables = list(optimizer._variables)
        added = len(variables) - size
        # A new list: TensorFlow cannot save one from which something was deleted.
        optimizer._variables = [*variables[: size - added], *variables[size:]]


@contextlib.contextmanager
def noting_slots(part: type, strategy: object) -> Iterator[list[tuple[keras.Variable, Any]]]:
    """Scope of an optimizer's build, which notes each slot and the variable it belongs to.

    Private because optimizers do not say which variable a slot belongs to. They make a slot right
    after they have read the shape of its variable.

    Args:
        part: the class of the variables; it has a property `shape`.
        strategy: an object whose `extended` makes slots beside variables of this class.
    """
    noted: list[tuple[keras.Variable, Any]] = []
    last: Any = None

    def read(original: Callable[..., Any], variable: Any) -> Any:
        nonlocal last
        last = variable
        return original(variable)

    def add(original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        slot = original(optimizer, *args, **kwargs)
        if last is not None:  # else a counter
            noted.append((slot, last))
        return slot

    def add_beside(original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        with distribution_strategy_of([optimizer], strategy):
            return original(optimizer, *args, **kwargs)

    base = keras.optimizers.Optimizer
    functions = {"add_variable": add, "add_variable_from_reference": add_beside}
    targets = [target_of(name, base, name) for name in functions] + [Target("shape", part, "shape")]
    with replacing(targets), substitutes({"build": None, "shape": read, **functions}):
        yield noted
