"""The one place of `training/` where Keras's private names are used, each with the reason.

A `Replacement` is a function of Keras or TensorFlow, private or public, that does something else
while a step is traced. Keras's losses, layers and optimizers call each other, and user code calls
them directly, so there is no other way to change what they do.

`tests/training/test_keras_private.py` fails with the name and the reason when a release moves one.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import pkgutil
import threading
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
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


# What a function of Keras or TensorFlow is before it is replaced.
Original: TypeAlias = Callable[..., Any]

# Functions without a public name that steps replace.
_OPS = "tensorflow.python.ops"
_VARIABLES = f"{_OPS}.resource_variable_ops:BaseResourceVariable"
_DISTRIBUTE = "tensorflow.python.distribute"
ADD = "keras.src.backend.tensorflow.numpy:add"
AGGREGATING_ASSIGN = f"{_DISTRIBUTE}.ps_values:AggregatingVariable._assign_func"
ASSIGN_DEPENDENCIES = f"{_VARIABLES}._assign_dependencies"
COND = "keras.src.backend.tensorflow.core:cond"
INSTANCE_KEY = f"{_DISTRIBUTE}.cross_device_utils:CollectiveReplicaLauncher._next_instance_key"
LAZY_READ = f"{_VARIABLES}._lazy_read"
MIRRORED_UPDATE = f"{_DISTRIBUTE}.values:MirroredVariable._update_replica"
OPERATION = "tensorflow.python.framework.op_def_library:_apply_op_helper"
PFOR = f"{_OPS}.parallel_for.control_flow_ops:_pfor_impl"
REDUCE_EXAMPLES = "keras.src.metrics.reduction_metrics:reduce_to_samplewise_values"
REDUCE_LOSS = "keras.src.losses.loss:reduce_weighted_values"
SHUFFLE = "keras.src.backend.tensorflow.random:shuffle"
TAKE = "keras.src.backend.tensorflow.numpy:take"


class Target(NamedTuple):
    """A function or a property that can be replaced.

    Attributes:
        owner: the class or module that defines it.
        name: its attribute there.
    """

    owner: type | types.ModuleType
    name: str


@dataclass(frozen=True, eq=False)
class Replacement:
    """What functions of Keras or TensorFlow do in a step. `replaces` makes one.

    Attributes:
        function: gets the step's context, the original and its arguments. The first line of its
            docstring says what it does, and why the function must be replaced.
        paths: modules and names there, as "keras:losses.Loss.__call__".
        overrides: names of methods that are also replaced where an optimizer's class has them.
        only: the first arguments with which the functions are replaced; empty for all.
    """

    function: Callable[..., Any]
    paths: Sequence[str]
    overrides: Sequence[str] = ()
    only: Collection[str] = ()

    @property
    def why(self) -> str:
        line = (inspect.getdoc(self.function) or "").partition("\n")[0].rstrip(".")
        return line[:1].lower() + line[1:]

    def targets(self) -> list[Target]:
        """The functions that this release has."""
        targets = []
        for path in self.paths:
            with contextlib.suppress(ImportError, AttributeError):
                targets.append(target_of(*_resolved(path)))
        for kind in _optimizer_classes() if self.overrides else ():
            targets += [Target(kind, name) for name in self.overrides if name in vars(kind)]
        return targets

    def not_called(self) -> TrainingError:
        """The error of a step that did not call the functions."""
        names = " or ".join(path.replace(":", ".") for path in self.paths)
        return TrainingError(
            f"The step did not call {names}, which {self.why}. Keras {keras.__version__} with"
            f" TensorFlow {tf.__version__} computes this another way, so the training would be"
            " wrong. Install versions that docs/compatibility.md lists as tested, or a newer"
            " tfdist_ext."
        )


REPLACED: list[Replacement] = []  # all of them, where steps/exact.py is imported


def replaces(*paths: str, **options: Any) -> Callable[[Callable[..., Any]], Replacement]:
    """Returns a decorator: a step calls the decorated function instead of these functions.

    Args:
        options: further attributes of the `Replacement`.
    """

    def decorate(function: Callable[..., Any]) -> Replacement:
        REPLACED.append(Replacement(function, paths, **options))
        return REPLACED[-1]

    return decorate


def _resolved(path: str) -> tuple[type | types.ModuleType, str]:
    """The class or module of a path, and the name there.

    Raises:
        ImportError, AttributeError: this release has no such module or class.
    """
    module, _, names = path.partition(":")
    owner, _, name = names.rpartition(".")
    try:
        return pkgutil.resolve_name(f"{module}:{owner}"), name
    except ImportError:  # Keras 3.16 has a package for operations
        module = module.replace(".tensorflow.", ".tensorflow.ops.")
        return pkgutil.resolve_name(f"{module}:{owner}"), name


def target_of(owner: type | types.ModuleType, name: str) -> Target:
    """Returns the target of a function of a module or a class, which may inherit it.

    Raises:
        AttributeError: the owner has no such function.
    """
    for base in inspect.getmro(owner) if isinstance(owner, type) else [owner]:
        if name in vars(base):
            return Target(base, name)
    raise AttributeError(f"{owner!r} has no {name!r}")


class _Step(threading.local):
    """What this thread calls instead of targets: (key of `substitutes`, function or None)."""

    substitutes: Mapping[Target, tuple[Any, Callable[..., Any] | None]] = MappingProxyType({})
    called: set[Any] | None = None  # None: not recorded


_step = _Step()


_lock = threading.RLock()  # Ctrl-C may come, and leave a scope, while this thread has it


# The original of each target that is replaced now, and by how many scopes.
_originals: dict[Target, tuple[Any, int]] = {}


@contextlib.contextmanager
def substitutes(
    functions: Mapping[Any, Callable[..., Any] | None] | None, called: set[Any] | None = None
) -> Iterator[None]:
    """Scope in which this thread calls other functions; other threads call the originals.

    Args:
        functions: for replacements or targets, functions that get the original and its arguments,
            or None to call the original. They are added to those of the scope around this one.
            None removes all.
        called: receives the keys of the functions that are called. By default they go where those
            of the scope around this one go.
    """
    before = _step.substitutes, _step.called
    known = {} if functions is None else dict(_step.substitutes)
    with contextlib.ExitStack() as stack:
        for key, function in (functions or {}).items():
            for target in key.targets() if isinstance(key, Replacement) else [key]:
                known[target] = key, function
                if function is not None:
                    stack.enter_context(_replaced(target))
        _step.substitutes, _step.called = known, _step.called if called is None else called
        try:
            yield
        finally:
            _step.substitutes, _step.called = before


@contextlib.contextmanager
def _replaced(target: Target) -> Iterator[None]:
    """Scope in which a target calls what a thread has put in its place.

    Several threads may be in it. When the last one leaves, the original is back.
    """
    with _lock:
        original, users = _originals.get(target, (vars(target.owner)[target.name], 0))
        _originals[target] = original, users + 1
        if not users:
            setattr(target.owner, target.name, _dispatching(target, original))
    try:
        yield
    finally:
        with _lock:
            original, users = _originals.pop(target)
            if users > 1:
                _originals[target] = original, users - 1
            else:
                setattr(target.owner, target.name, original)


def _dispatching(target: Target, original: Any) -> Any:
    """Returns a function or a property that calls the substitute of this thread."""
    if isinstance(original, property):
        return property(_dispatching(target, original.fget))

    @functools.wraps(original)
    def dispatch(*args: Any, **kwargs: Any) -> Any:
        key, substitute = _step.substitutes.get(target, (target, None))
        only = key.only if isinstance(key, Replacement) else ()
        if substitute is None or (only and args[0] not in only):
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
    known = [v for v in variables if raw_value(v) is not None] if optimizers else []
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

    Keras calls the model as in a test, for the shapes of its outputs; a graph of layers knows
    them. A model that fails there may still train, such as one with RandomCrop before Flatten.
    """
    build = NAMES.of(model, "_symbolic_build", "metrics and optimizers before a step")

    def attempt(call: Callable[..., Any] | None) -> None:
        instead = substitutes({target_of(type(model), "call"): call})
        with instead, unbuilt_after_error(getattr(model, "optimizer", None)):
            build(data_batch=batch)

    try:
        attempt(_known_outputs(model))
    except ValueError:
        attempt(lambda call, *args, **named: call(*args, **named | (named and {"training": True})))


@contextlib.contextmanager
def unbuilt_after_error(optimizer: Any) -> Iterator[None]:
    """Scope that builds an optimizer. Keras says that it is built before it has created slots."""
    was_built = getattr(optimizer, "built", True)
    try:
        yield
    except BaseException:
        if not was_built:
            optimizer.built = False
        raise


def _known_outputs(model: keras.Model) -> Callable[..., Any] | None:
    """Returns what gives the outputs' shapes of a graph of layers, in place of its call.

    None for other models, whose call may make variables or take other shapes.
    """
    own_calls = keras.Sequential.call, NAMES("models.functional.Functional").call
    if type(model).call not in own_calls or not all(layer.built for layer in flat_layers(model)):
        return None
    # A Sequential that takes a dict has no inputs.
    shapes = [tensor.shape for tensor in getattr(model, "inputs", ())]

    def call(original: Original, called: keras.Model, *args: Any, **named: Any) -> Any:
        taken = [getattr(tensor, "shape", None) for tensor in keras.tree.flatten(args)]
        if called is not model or taken != shapes:
            return original(called, *args, **named)
        outputs = model.compute_output_spec(model.inputs)
        is_list_of_one = isinstance(outputs, list | tuple) and len(outputs) == 1
        return outputs[0] if is_list_of_one else outputs

    return call


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
    generator = NAMES("backend.common.global_state.get_global_attribute")(_SEEDS)
    return None if generator is None else generator.state.numpy()


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
    before = [NAMES.of(optimizer, "_distribution_strategy", use) for optimizer in optimizers]
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
    kinds = [keras.optimizers.Optimizer, *_optimizer_classes()]
    return list(dict.fromkeys(target_of(kind, "build") for kind in kinds))


def _optimizer_classes() -> list[type[keras.optimizers.Optimizer]]:
    """All classes of optimizers below `keras.optimizers.Optimizer`."""
    kinds = [keras.optimizers.Optimizer]
    for kind in kinds:
        kinds += [subclass for subclass in kind.__subclasses__() if subclass not in kinds]
    return kinds[1:]


@contextlib.contextmanager
def building_again(optimizers: Sequence[keras.optimizers.Optimizer]) -> Iterator[None]:
    """Scope of the second build of optimizers. Its variables replace those of the first build.

    Private because Keras builds an optimizer once, and appends the variables to one list.
    """
    before = [len(NAMES.of(opt, "_variables", "the slots of optimizers")) for opt in optimizers]
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
    functions: dict[Any, Callable[..., Any]] = {
        target_of(base, "add_variable"): add,
        target_of(base, "add_variable_from_reference"): add_beside,
        target_of(part, "shape"): read,
    }
    with substitutes({**dict.fromkeys(optimizer_builds()), **functions}):
        yield noted
