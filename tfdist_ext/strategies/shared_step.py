"""One step for all replicas of a worker: traced once, and called on the variables of each.

With a trace for each replica, the time of the first step and the size of its graph grow with the
number of replicas. The steps of replicas differ only in their variables and in their inputs. So a
step is traced once and becomes functions that take both as arguments and are not inlined. The sums
over replicas are in the graph around these functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import tensorflow as tf

from tfdist_ext.errors import StrategyError
from tfdist_ext.strategies import _tf_private as tp
from tfdist_ext.strategies.stages import MeetingPoint, Stage, cut, source_of, tensor_name
from tfdist_ext.strategies.traced_replica import Meeting, NotSharedError, TracedReplica

__all__ = ["SharedStep", "kind_of"]

# The tensors of one replica, by their names in the trace.
Tensors: TypeAlias = dict[str, tf.Tensor]

# By the id of a captured handle, the handles of the copies, one for each local replica.
Handles: TypeAlias = dict[int, list[tf.Tensor]]


class SharedStep:
    """A step of one replica, as functions that each local replica calls.

    Args:
        devices: of the local replicas.
        first: the number of the first of them, in the order of all.
        step: called once, with the arguments of a replica, in the context of a `TracedReplica`.
        args: for each local replica, its arguments: of one structure, with tensors of any shapes.
        copies: after the trace, the copies of each variable that it may use, one for each replica.
        jit_compile: XLA compiles its functions where it can; never the sums between them.

    Attributes:
        compiled: how many of its functions XLA compiles.
        not_compiled: why it does not compile the others.

    Raises:
        NotSharedError: it needs a trace for each replica.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        devices: Sequence[str],
        first: int,
        step: Callable[..., Any],
        args: Sequence[Sequence[Any]],
        copies: Callable[[], Iterable[Sequence[tf.Variable]]],
        *,
        jit_compile: bool = False,
    ):
        self._strategy = strategy
        self._devices = devices
        self.compiled, self.not_compiled = 0, list[str]()
        with tf.init_scope():  # constants in the graph would make the calls unlike
            self._numbers = [tf.constant(first + local) for local in range(len(devices))]
        specs = _specs(args)
        self._trace = self._traced(step, args[0], first, specs, jit_compile)
        graph = self._trace.graph
        definition = graph.as_graph_def()
        nodes = {node.name: node for node in definition.node}
        names = [tensor.name for tensor in graph.inputs]
        self._given, captured = names[: len(specs) + 1], names[len(specs) + 1 :]
        self._sources = dict(zip(captured, self._trace.captured_inputs, strict=True))
        self._returned = [source_of(tensor.name, nodes) for tensor in self._trace.outputs]
        points = [
            MeetingPoint(
                [tensor.name for tensor in _leaves(meeting.values)],
                [tensor.op.name for tensor in _leaves(meeting.results)],
            )
            for meeting in self._replica.meetings
        ]
        outside = {tensor.op.name for tensor in graph.inputs}
        ordered = {op.name for op in graph.get_operations() if op.op_def.is_stateful}
        stages = cut(definition.node, points, outside, self._returned, ordered - outside)
        self._handles = _handles([*self._read_copies(), *copies()])
        self._check_known()
        self._check_devices()
        self._functions = self._functions_of(stages, definition, jit_compile)

    def _traced(
        self,
        step: Callable[..., Any],
        args: Sequence[Any],
        first: int,
        specs: list[tf.TensorSpec],
        jit_compile: bool,
    ) -> tf.types.experimental.ConcreteFunction:
        """The trace of the step. The functions in Python that the step calls live in its graph."""

        def run(number: tf.Tensor, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
            self._replica = TracedReplica(self._strategy, first, number)
            with self._replica:
                self._result = step(*_packed(args, tensors))
            return _leaves(self._result)

        # XLA has gradients of loops that it can compile.
        trace = tf.function(run, autograph=False, jit_compile=jit_compile or None)
        try:
            return trace.get_concrete_function(tf.TensorSpec([], tf.int32), specs)
        except Exception:
            if self._replica.refused is None:
                raise
            raise NotSharedError(self._replica.refused) from None

    def _functions_of(
        self, stages: Sequence[Stage], definition: tf.compat.v1.GraphDef, jit_compile: bool
    ) -> list[_StageFunction]:
        """The functions of the stages, optimized for the device of the first replica."""
        graph, device = self._trace.graph, self._devices[0]
        if jit_compile and not self._variables_are_near():
            jit_compile = False
            self.not_compiled = ["replicas use a variable that is on another device"]
        reasons = [self._why_no_xla(stage) if jit_compile else None for stage in stages]
        by_xla = [jit_compile and why is None for why in reasons]

        def optimized(stage: Stage, compiled: bool) -> tf.compat.v1.GraphDef:
            return _optimized(stage, graph, definition, device, compiled)

        with ThreadPoolExecutor() as pool:  # TensorFlow's optimizer releases the GIL
            graphs = list(pool.map(optimized, stages, by_xla))
        functions = []
        for stage, nodes, compiled, why in zip(stages, graphs, by_xla, reasons, strict=True):
            function = _StageFunction(stage, nodes, graph, self._sources, compiled)
            functions.append(function)
            if function.computes:
                self.compiled += compiled
                self.not_compiled += [] if why is None else [why]
        return functions

    def __call__(self, args: Sequence[Sequence[Any]]) -> list[Any]:
        """The results of each local replica, in cross-replica context."""
        known: list[Tensors] = []
        for number, mine in zip(self._numbers, args, strict=True):
            given = dict(zip(self._given, [number, *_leaves(mine)], strict=True))
            known.append({**self._sources, **given})
        meetings = [None, *self._replica.meetings]
        for meeting, function in zip(meetings, self._functions, strict=True):
            if meeting is not None:
                self._hold(meeting, known)
            if not function.computes:
                continue
            for replica, tensors in enumerate(known):
                with tf.device(self._devices[replica]):
                    tensors.update(function(tensors, replica, self._handles))
        return [
            _packed(self._result, [tensors[name] for name in self._returned]) for tensors in known
        ]

    def _hold(self, meeting: Meeting, known: Sequence[Tensors]) -> None:
        brought = [leaf.name for leaf in _leaves(meeting.values)]
        of_all = []
        for device, mine in zip(self._devices, known, strict=True):
            leaves = [_on(device, mine[name]) for name in brought]
            values = _packed(meeting.values, leaves)
            of_all.append(tf.nest.map_structure(_of_known_shape, values, meeting.values))
        local = self._strategy.experimental_local_results
        results = [local(each) for each in meeting.hold(tp.per_replica(of_all, always=True))]
        marks = [leaf.name for leaf in _leaves(meeting.results)]
        for replica, tensors in enumerate(known):
            got = _leaves([each[replica % len(each)] for each in results])
            tensors.update(zip(marks, got, strict=True))

    def _read_copies(self) -> Iterable[Sequence[tf.Variable]]:
        """The copies of each variable that the step has read."""
        for variable in self._trace.graph.variables:
            container = self._strategy.extended.value_container(variable)
            yield self._strategy.experimental_local_results(container)

    def _why_no_xla(self, stage: Stage) -> str | None:
        """Why XLA cannot compile a stage; None where nothing is known against it."""
        passed = [name for name in (*stage.inputs, *stage.outputs) if name not in self._sources]
        kinds = [self._trace.graph.get_tensor_by_name(name).dtype for name in passed]
        if tf.variant in kinds:
            return "a sum over replicas is between the turns of a loop and their gradients"
        return None

    def _variables_are_near(self) -> bool:
        """Each replica has a copy of each variable that the step uses."""
        used = [self._handles.get(id(source), []) for source in self._sources.values()]
        apart = [len({copy.device for copy in copies}) for copies in used if copies]
        return all(count == len(self._devices) for count in apart)

    def _check_known(self) -> None:
        for name, source in self._sources.items():
            if source.dtype == tf.resource and id(source) not in self._handles:
                users = self._trace.graph.get_tensor_by_name(name).consumers()
                if not all(user.type.startswith("LookupTable") for user in users):
                    kinds = ", ".join(sorted({user.type for user in users}))
                    raise NotSharedError(
                        f"it uses something that is in no variable known ({kinds})"
                    )

    def _check_devices(self) -> None:
        """TensorFlow puts an operation, a loop too, where all variables are that it takes."""
        for operation in self._trace.graph.get_operations():
            taken = [self._sources.get(tensor.name) for tensor in operation.inputs]
            variables = [copies for each in taken if (copies := self._handles.get(id(each)))]
            for replica in range(len(self._devices)):
                if len({copies[replica % len(copies)].device for copies in variables}) > 1:
                    raise NotSharedError(
                        f"an operation in it takes variables of several devices ({operation.type})"
                    )


class _StageFunction:
    """A stage of a step as a function that each replica calls.

    Args:
        nodes: of the stage, optimized.
        graph: of the trace.
        sources: what the trace has captured, by the name that it has there.
        jit_compile: XLA compiles it.

    Attributes:
        computes: whether there is anything to do.
    """

    def __init__(
        self,
        stage: Stage,
        nodes: tf.compat.v1.GraphDef,
        graph: tf.Graph,
        sources: Tensors,
        jit_compile: bool,
    ):
        self.computes = bool(nodes.node)
        if not self.computes:
            return
        taken = [graph.get_tensor_by_name(name) for name in stage.inputs if name not in sources]
        self._taken = [tensor.name for tensor in taken]
        self._outputs = stage.outputs
        specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in taken]
        self._shapes = [graph.get_tensor_by_name(name).shape for name in stage.outputs]
        used = {tensor_name(name) for node in nodes.node for name in node.input}

        def run(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
            inner = tf.compat.v1.get_default_graph()
            inputs = dict(zip(self._taken, tensors, strict=True))
            for name in stage.inputs:
                if name in sources and name in used:
                    inputs[name] = inner.capture(sources[name])
            mine = {name: tensor for name, tensor in inputs.items() if name in used}
            return tf.graph_util.import_graph_def(nodes, mine, list(stage.outputs), name="")

        # TensorFlow would optimize an inlined function again for each replica.
        traced = tf.function(
            run,
            autograph=False,
            jit_compile=jit_compile or None,
            experimental_attributes={"_noinline": True},
        )
        # Kept, because the functions that it calls live as long as it does.
        self._known = traced.get_concrete_function(specs)
        self._function = tp.unchanged_by_calls(self._known, nodes)

    def __call__(self, tensors: Tensors, replica: int, handles: Handles) -> Tensors:
        """The outputs of the stage on one replica, by name."""
        args = [tensors[name] for name in self._taken]
        for source in self._known.captured_inputs:
            copies = handles.get(id(source))
            args.append(copies[replica % len(copies)] if copies else source)
        call = tp.call_in_graph(self._function, args)
        for output, shape in zip(call.outputs, self._shapes, strict=True):
            output.set_shape(shape)
        return dict(zip(self._outputs, call.outputs, strict=True))


def _optimized(
    stage: Stage,
    graph: tf.Graph,
    definition: tf.compat.v1.GraphDef,
    device: str,
    jit_compile: bool,
) -> tf.compat.v1.GraphDef:
    """A stage's nodes as a graph of their own, optimized for a device, and bound to none.

    Its inputs have their names in the trace. XLA takes them as they are, and optimizes itself.

    Raises:
        NotSharedError: TensorFlow cannot optimize it alone.
    """
    marks = {name: f"input_of_stage_{number}" for number, name in enumerate(stage.inputs)}
    nodes = _nodes_of(stage, definition, marks, device)
    names = {node.name for node in nodes.node}
    effects = [op.name for op in graph.control_outputs if op.name in names]
    if not stage.outputs and not effects:
        return tf.compat.v1.GraphDef()
    for name, mark in marks.items():
        tensor = graph.get_tensor_by_name(name)
        node = nodes.node.add(name=mark, op="Placeholder", device=device)
        node.attr["dtype"].type = tensor.dtype.as_datatype_enum
        node.attr["shape"].shape.CopyFrom(tensor.shape.as_proto())
    wanted = [*stage.outputs, *effects, *marks.values()]
    try:
        made = nodes if jit_compile else tp.optimized(nodes, wanted, device)
    except ValueError as error:
        if isinstance(error, StrategyError):
            raise
        raise NotSharedError(f"TensorFlow cannot optimize a part of it: {error}") from error
    inputs = {tensor_name(mark): name for name, mark in marks.items()}
    found = tf.compat.v1.GraphDef(versions=made.versions, library=made.library)
    for node in made.node:
        if tensor_name(node.name) not in inputs:
            copy = found.node.add()
            copy.CopyFrom(node)
            copy.device = "" if node.device == device else node.device
            del copy.input[:]
            for name in node.input:
                if not (name.startswith("^") and tensor_name(name[1:]) in inputs):
                    copy.input.append(inputs.get(tensor_name(name), name))
    return found


def _nodes_of(
    stage: Stage,
    definition: tf.compat.v1.GraphDef,
    marks: dict[str, str],
    device: str,
) -> tf.compat.v1.GraphDef:
    """A stage's nodes as a graph of their own, each on a device.

    Args:
        marks: nodes for its inputs.
    """
    mine = set(stage.nodes)
    found = tf.compat.v1.GraphDef(versions=definition.versions, library=definition.library)
    for node in definition.node:
        if node.name not in mine:
            continue
        copy = found.node.add()
        copy.CopyFrom(node)
        copy.device = node.device or device
        copy.attr.pop("_class", None)  # a device beside a node that may be in another stage
        del copy.input[:]
        for name in node.input:
            if name.startswith("^"):
                # What it waits for outside of the stage is done before the stage.
                if name[1:] in mine:
                    copy.input.append(name)
            else:
                copy.input.append(marks.get(tensor_name(name), name))
    return found


def _handles(copies: Iterable[Sequence[tf.Variable]]) -> Handles:
    return {id(each[0].handle): [copy.handle for copy in each] for each in copies}


def _leaves(structure: Any) -> list[tf.Tensor]:
    flat = tf.nest.flatten(structure, expand_composites=True)
    return [leaf for leaf in flat if leaf is not None]


def _on(device: str, tensor: tf.Tensor) -> tf.Tensor:
    """The tensor, which knows its device: reductions go by it."""
    if tensor.device:
        return tensor
    with tf.device(device):
        return tf.identity(tensor)


def _of_known_shape(value: Any, traced: Any) -> Any:
    """Slices that say of which shape their tensor is, where it was known when they were traced."""
    if not isinstance(traced, tf.IndexedSlices) or not traced.shape.is_fully_defined():
        return value
    shape = tf.constant(traced.shape.as_list(), traced.dense_shape.dtype)
    return tf.IndexedSlices(value.values, value.indices, shape)


def _packed(structure: Any, leaves: Iterable[tf.Tensor]) -> Any:
    """Other tensors in a structure, in the order of `_leaves`."""
    rest = iter(leaves)
    flat = tf.nest.flatten(structure, expand_composites=True)
    each = [None if leaf is None else next(rest) for leaf in flat]
    return tf.nest.pack_sequence_as(structure, each, expand_composites=True)


def kind_of(args: Sequence[Sequence[Any]]) -> tuple[Any, ...]:
    """What makes arguments of replicas another trace: their structure, and the specs of tensors."""
    return str(tf.nest.map_structure(type, args[0])), *_specs(args)


def _specs(args: Sequence[Sequence[Any]]) -> list[tf.TensorSpec]:
    """For each tensor of a replica's arguments, a spec that holds for all replicas."""
    return [_common(tensors) for tensors in zip(*map(_leaves, args), strict=True)]


def _common(tensors: Sequence[tf.Tensor]) -> tf.TensorSpec:
    """The spec of all of these tensors."""
    shape = tensors[0].shape
    for tensor in tensors[1:]:
        shape = shape.most_specific_compatible_shape(tensor.shape)
    return tf.TensorSpec(shape, tensors[0].dtype)
