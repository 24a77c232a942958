"""The private names of TensorFlow that training uses, each with the reason."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import tensorflow as tf

from tfdist_ext.errors import TrainingError
from tfdist_ext.private_names import PrivateNames

NAMES = PrivateNames(
    "tensorflow.python",
    TrainingError,
    {
        "distribute.mirrored_strategy.MirroredExtended": "variables of several workers",
        "eager.context.context": "the other workers, and the graphs of eager functions",
        "eager.context.get_function_def": "the graphs of functions that eager code calls",
        "eager.record.could_possibly_record": "gradients of the global batch",
        "eager.tape.variable_accessed": "gradients of variables in shards",
        "framework.function_def_to_graph.function_def_to_graph": "the graphs of functions",
        "framework.op_callbacks.add_op_callback": "what eager code computed a tensor from",
        "framework.op_callbacks.remove_op_callback": "what eager code computed a tensor from",
        "framework.op_def_registry.get": "which operations are stateful",
    },
)


def _context() -> Any:
    return NAMES("eager.context.context")()


def read_by_tapes(stand_in: object) -> None:
    """Let open gradient tapes watch the `handle` of what stands in for a trainable variable.

    Private because only a tf.Variable is watched without the user's word.
    """
    NAMES("eager.tape.variable_accessed")(stand_in)


@contextlib.contextmanager
def creating_without_broadcast(
    strategy: tf.distribute.MultiWorkerMirroredStrategy,
) -> Iterator[None]:
    """Scope in which the variables of MultiWorkerMirroredStrategy start from this task's values.

    Private because it broadcasts the chief's value of each new variable: where workers make other
    variables, that fails or waits forever, before anyone could compare the models.
    """
    mirrored, extended = NAMES("distribute.mirrored_strategy.MirroredExtended"), strategy.extended
    name, use = "_get_variable_creator_initial_value", "variables of several workers"
    outer = vars(extended).get(name)
    setattr(extended, name, NAMES.of(mirrored, name, use).__get__(extended))
    try:
        yield
    finally:
        if outer is None:
            delattr(extended, name)
        else:
            setattr(extended, name, outer)


def has_coordination_service() -> bool:
    """Whether this process is in a cluster whose tasks share a key-value store.

    Private because MultiWorkerMirroredStrategy starts the coordination service and shows it
    nowhere. It is the one channel between workers that works while a collective waits.
    """
    return _context().coordination_service is not None


def gathered_values(
    original: Callable[..., Any],
    launcher: Any,
    slices: tf.IndexedSlices,
    options: tf.distribute.experimental.CommunicationOptions | None = None,
) -> tf.IndexedSlices:
    """Instead of `CollectiveReplicaLauncher.all_reduce_indexed_slices`: the values of all replicas.

    Private because each public gathering asks all replicas for their sizes first, which are equal
    here, and TensorFlow gathers values and indices apart: three collectives instead of one.
    """
    gather = NAMES.of(launcher, "_all_gather", "gradients of tables")
    return tf.IndexedSlices(gather(slices.values, options), slices.indices, slices.dense_shape)


def insert_value(key: str, value: str) -> bool:
    """Insert into the store of the coordination service; False where the key exists.

    Private as `has_coordination_service` is. Takes half a millisecond.

    Raises:
        tf.errors.OpError: the task that keeps the store does not answer.
    """
    try:
        _context().set_config_key_value(key, value)
    except tf.errors.AlreadyExistsError:
        return False
    return True


def replace_value(key: str, value: str) -> None:
    """`insert_value`, in the place of what was there."""
    _context().delete_config_key_value(key)
    insert_value(key, value)


def get_value(key: str, *, seconds: float) -> str | None:
    """A value of the store, waited for; None where it does not come. Private and raises as above.

    Other threads of Python run meanwhile.
    """
    try:
        return str(_context().get_config_key_value(key, max(1, int(seconds * 1000))))
    except (tf.errors.DeadlineExceededError, tf.errors.NotFoundError):
        return None


def peer_status(job: str, index: int, *, seconds: float = 1.0) -> str:
    """ "there", "gone" (nothing listens at its address, or another process) or "silent".

    Private because nothing public asks TensorFlow's server of another task whether it is there.
    """
    task = f"/job:{job}/replica:0/task:{index}"
    try:
        _context().check_collective_ops_peer_health(task, int(seconds * 1000))
    except (tf.errors.UnavailableError, tf.errors.FailedPreconditionError):
        return "gone"
    except tf.errors.OpError:
        return "silent"
    return "there"


def abort_collectives(message: str) -> None:
    """Let every collective of this process fail, now and from now on, with this message.

    Private because there is no public way to end a collective that waits.
    """
    _context().abort_collective_ops(tf.errors.UNAVAILABLE, message)


def is_recording() -> bool:
    """Whether any gradient tape records in this thread.

    Private because a tape knows of itself alone.
    """
    return NAMES("eager.record.could_possibly_record")()


@functools.cache
def is_stateful(kind: str) -> bool:
    """Whether operations of a type are stateful; not so what is no operation, but a function.

    Private because an operation that was run eagerly is not kept.
    """
    definition = NAMES("framework.op_def_registry.get")(kind)
    return definition is not None and definition.is_stateful


def function_graph(graph: tf.Graph | None, name: str) -> tf.Graph | None:
    """The graph of a function that is called in a graph, or eagerly where that is None.

    Private because public names give functions to call, not those that are called by others. None
    where it is not known.
    """
    if graph is None:
        return _eager_function_graph(name)
    while graph is not None:
        found = graph._get_function(name)
        if found is not None:
            return getattr(found, "graph", None)
        graph = getattr(graph, "outer_graph", None)
    return None


@functools.lru_cache(100)
def _eager_function_graph(name: str) -> tf.Graph | None:
    if not _context().has_function(name):
        return None
    with tf.Graph().as_default():
        to_graph = NAMES("framework.function_def_to_graph.function_def_to_graph")
        return to_graph(NAMES("eager.context.get_function_def")(name))


@contextlib.contextmanager
def recorded_operations() -> Iterator[None]:
    """Scope in which threads can record, entered in the thread that runs them.

    A thread that stops recording would otherwise end it for the others.
    """

    def nothing(*_: object, **__: object) -> None:
        pass

    NAMES("framework.op_callbacks.add_op_callback")(nothing)
    try:
        yield
    finally:
        NAMES("framework.op_callbacks.remove_op_callback")(nothing)


@contextlib.contextmanager
def recording_operations(note: Callable[..., None]) -> Iterator[None]:
    """Scope that calls `note(type, inputs, attributes, outputs)` for what this thread runs eagerly.

    Private because an eager tensor does not know what it was computed from.
    """

    def called(
        kind: str,
        inputs: Sequence[tf.Tensor],
        attributes: Any,
        outputs: Sequence[tf.Tensor],
        *_: object,
        graph: tf.Graph | None = None,
        **__: object,
    ) -> None:
        if graph is None:
            kind = tf.compat.as_str(kind)
            attributes = attributes or ()
            if NAMES("framework.op_def_registry.get")(kind) is None:  # a function
                kind, attributes = "PartitionedCall", ("f", SimpleNamespace(name=kind))
            named = dict(zip(attributes[::2], attributes[1::2], strict=True))
            note(kind, tuple(inputs), named, tuple(outputs))

    ctx = _context()
    ctx.add_op_callback(called)
    try:
        yield
    finally:
        ctx.remove_op_callback(called)
