"""One step for all replicas of a worker: traced once, and called on the variables of each.

With a trace for each replica, the time of the first step and the size of its graph grow with the
number of replicas. The steps of the replicas differ only in their variables and in their inputs.
So a step is traced once. A step that sums over replicas cannot be one function that each replica
calls. The trace is cut into stages at each sum, a sync point, and each stage becomes a function
that takes variables and inputs as arguments. The graph calls the function of a stage for each
replica, without inlining, and then sums.

A node belongs to the stage between the sync points where it was made, or to an earlier stage that
needs it: the gradient of a loop gives the loop inputs that are made after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from graphlib import TopologicalSorter
from typing import Any, NamedTuple, TypeAlias

import tensorflow as tf

from tfdist_ext.data.pipelines import operations_in
from tfdist_ext.errors import StrategyError
from tfdist_ext.strategies import _tf_private
from tfdist_ext.strategies.traced_replica import NotSharedError, SyncPoint, TracedReplica
from tfdist_ext.user_frames import warn

# The tensors of one replica, by their names in the trace.
Tensors: TypeAlias = dict[str, tf.Tensor]

# By the id of a captured handle, the handles of the copies, one for each local replica.
Handles: TypeAlias = dict[int, list[tf.Tensor]]

# Operations that `call_on_device` cannot run: TensorFlow replaces some by others, but only in
# functions for several devices. The state of others belongs to a step, which such a call lacks.
FOR_SEVERAL_DEVICES = {"While", "StatelessWhile", "AccumulateNV2", "TemporaryVariable", "StackV2"}
FOR_SEVERAL_DEVICES |= {"TensorArrayV3", "TensorArrayGradV3"}


class Stage(NamedTuple):
    """A part of a step between two sync points.

    Attributes:
        nodes: names of its nodes.
        inputs: tensors from outside of the stage, as "name:number", in order.
        outputs: its tensors that are used outside of the stage, in order.
    """

    nodes: set[str]
    inputs: dict[str, None]
    outputs: dict[str, None]


class SharedStep:
    """A step of one replica, as functions that each local replica calls.

    Args:
        devices: of the local replicas.
        first: the index of the first of them, over all workers.
        step: called once, with the arguments of a replica, in the context of a `TracedReplica`.
        args: for each local replica, its arguments: of one structure, with tensors of any shapes.
        copies: after the trace, the copies of each variable that it may use, one for each replica.
        jit_compile: XLA compiles the functions if it can; never the sums between them.

    Attributes:
        jit_compile: whether XLA compiles the functions.

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
        with tf.init_scope():  # constants in the graph would make the calls differ
            self._numbers = [tf.constant(first + local) for local in range(len(devices))]
        specs = _specs(args)
        self._trace = self._traced(step, args[0], first, specs, jit_compile)
        graph = self._trace.graph
        definition = graph.as_graph_def()
        names = [tensor.name for tensor in graph.inputs]
        self._arguments, captured = names[: len(specs) + 1], names[len(specs) + 1 :]
        self._sources = dict(zip(captured, self._trace.captured_inputs, strict=True))
        self._returned = [tensor.name for tensor in self._trace.outputs]
        points = [
            (
                [tensor.name for tensor in _leaves(point.values)],
                [tensor.op.name for tensor in _leaves(point.results)],
            )
            for point in self._replica.sync_points
        ]
        inputs = {tensor.op.name for tensor in graph.inputs}
        stateful = {op.name for op in graph.get_operations() if op.op_def.is_stateful}
        stages = cut(definition.node, points, inputs, self._returned, stateful - inputs)
        containers = map(strategy.extended.value_container, graph.variables)
        variables = [*map(strategy.experimental_local_results, containers), *copies()]
        self._handles = {id(v[0].handle): [copy.handle for copy in v] for v in variables}
        for operation in graph.get_operations():
            self._check_captures(operation)
        self.jit_compile = jit_compile
        if jit_compile and (why := self._why_no_xla(stages)):
            self.jit_compile = False
            warn(f"jit_compile=True is off: {why}.")

        def optimized(stage: Stage) -> tf.compat.v1.GraphDef | None:
            return _optimized(stage, graph, definition, devices[0], self.jit_compile)

        with ThreadPoolExecutor() as pool:  # TensorFlow's optimizer releases the GIL
            self._functions = [
                None
                if nodes is None
                else _StageFunction(stage, nodes, graph, self._sources, self.jit_compile)
                for stage, nodes in zip(stages, pool.map(optimized, stages), strict=True)
            ]

    def _traced(
        self,
        step: Callable[..., Any],
        args: Sequence[Any],
        first: int,
        specs: list[tf.TensorSpec],
        jit_compile: bool,
    ) -> tf.types.experimental.ConcreteFunction:
        """The trace of the step. It keeps the Python functions alive that the step calls."""

        def run(number: tf.Tensor, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
            self._replica = TracedReplica(self._strategy, first, number)
            with self._replica:
                self._result = step(*_packed(args, tensors))
            return _leaves(self._result)

        # For XLA, TensorFlow traces other gradients of loops.
        trace = tf.function(run, autograph=False, jit_compile=jit_compile or None)
        try:
            return trace.get_concrete_function(tf.TensorSpec([], tf.int32), specs)
        except Exception:
            if self._replica.refused is None:
                raise
            raise NotSharedError(self._replica.refused) from None

    def __call__(self, args: Sequence[Sequence[Any]]) -> list[Any]:
        """The results of each local replica, in cross-replica context."""
        tensors_of_replicas: list[Tensors] = []
        for number, replica_args in zip(self._numbers, args, strict=True):
            arguments = dict(zip(self._arguments, [number, *_leaves(replica_args)], strict=True))
            tensors_of_replicas.append({**self._sources, **arguments})
        points = [None, *self._replica.sync_points]
        for point, function in zip(points, self._functions, strict=True):
            if point is not None:
                self._synchronize(point, tensors_of_replicas)
            if function is not None:
                for replica, tensors in enumerate(tensors_of_replicas):
                    device = self._devices[replica]
                    tensors.update(function(tensors, replica, self._handles, device))
        return [
            _packed(self._result, [tensors[name] for name in self._returned])
            for tensors in tensors_of_replicas
        ]

    def _synchronize(self, point: SyncPoint, tensors_of_replicas: Sequence[Tensors]) -> None:
        """Sum the values of all replicas at a sync point, and add the results to the tensors."""
        value_names = [leaf.name for leaf in _leaves(point.values)]
        values_of_replicas = []
        for device, tensors in zip(self._devices, tensors_of_replicas, strict=True):
            leaves = [_on_device(device, tensors[name]) for name in value_names]
            values = _packed(point.values, leaves)
            values_of_replicas.append(tf.nest.map_structure(_of_known_shape, values, point.values))
        reduced = point.reduce(_tf_private.per_replica(values_of_replicas, always=True))
        reduced_copies = [self._strategy.experimental_local_results(value) for value in reduced]
        result_names = [leaf.name for leaf in _leaves(point.results)]
        for replica, tensors in enumerate(tensors_of_replicas):
            results = _leaves([copies[replica % len(copies)] for copies in reduced_copies])
            tensors.update(zip(result_names, results, strict=True))

    def _why_no_xla(self, stages: Sequence[Stage]) -> str | None:
        """Why XLA cannot compile the stages; None if no reason is known."""
        for source in self._sources.values():
            copies = self._handles.get(id(source), [])
            if copies and len({copy.device for copy in copies}) < len(self._devices):
                return "replicas use a variable that is on another device"
        names = [name for stage in stages for name in stage.outputs]
        if any(self._trace.graph.get_tensor_by_name(name).dtype == tf.variant for name in names):
            return "a sum over replicas is between a loop and its gradients"
        return None

    def _check_captures(self, operation: tf.Operation) -> None:
        """Check that each replica can run an operation with its own copies of variables.

        TensorFlow puts an operation, a loop too, where all variables are that it takes.
        """
        taken = [self._sources[x.name] for x in operation.inputs if x.name in self._sources]
        variables = [self._handles[id(source)] for source in taken if id(source) in self._handles]
        resources = [source for source in taken if source.dtype == tf.resource]
        if len(resources) > len(variables) and not operation.type.startswith("LookupTable"):
            raise NotSharedError(
                f"the step uses a resource that is not a known variable ({operation.type})"
            )
        for replica in range(len(self._devices)):
            if len({copies[replica % len(copies)].device for copies in variables}) > 1:
                raise NotSharedError(
                    f"an operation in the step uses variables of several devices ({operation.type})"
                )


class _StageFunction:
    """A stage of a step as a function that each replica calls.

    Args:
        nodes: from `_optimized`.
        graph: of the trace.
        sources: what the trace has captured, by the name that it has there.
        jit_compile: XLA compiles the function.
    """

    def __init__(
        self,
        stage: Stage,
        nodes: tf.compat.v1.GraphDef,
        graph: tf.Graph,
        sources: Tensors,
        jit_compile: bool,
    ):
        taken = [graph.get_tensor_by_name(name) for name in stage.inputs if name not in sources]
        self._taken = [tensor.name for tensor in taken]
        self._outputs = list(stage.outputs)
        specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in taken]
        self._shapes = [graph.get_tensor_by_name(name).shape for name in stage.outputs]
        used = {_tensor_name(name) for node in nodes.node for name in node.input}

        def run(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
            inner = tf.compat.v1.get_default_graph()
            args = dict(zip(self._taken, tensors, strict=True))
            inputs = {
                placeholder: args[name] if name in args else inner.capture(sources[name])
                for name, placeholder in _placeholder_names(stage).items()
                if placeholder in used
            }
            return tf.graph_util.import_graph_def(nodes, inputs, self._outputs, name="")

        # TensorFlow would optimize an inlined function again for each replica.
        traced = tf.function(
            run,
            autograph=False,
            jit_compile=jit_compile or None,
            experimental_attributes={"_noinline": True},
        )
        # Kept, because the functions that it calls live as long as it does.
        self._known = traced.get_concrete_function(specs)
        self._function = _tf_private.unchanged_by_calls(self._known, nodes)
        # Whether `call_on_device` can call it, for variables on the replica's own CPU.
        self._is_of_one_device = (
            bool(stage.outputs)
            and not jit_compile
            and not any(node.device for node in nodes.node)
            and FOR_SEVERAL_DEVICES.isdisjoint(operations_in(nodes))
        )

    def __call__(self, tensors: Tensors, replica: int, handles: Handles, device: str) -> Tensors:
        """The outputs of the stage on one replica, by name."""
        args = [tensors[name] for name in self._taken]
        for source in self._known.captured_inputs:
            copies = handles.get(id(source))
            args.append(copies[replica % len(copies)] if copies else source)
        is_local = all(arg.device == device for arg in args if arg.dtype == tf.resource)
        is_on_cpu = tf.DeviceSpec.from_string(device).device_type == "CPU"
        with tf.device(device):
            if self._is_of_one_device and is_local and is_on_cpu:
                call = _tf_private.call_on_device(self._function, args, device)
            else:
                call = _tf_private.call_in_graph(self._function, args)
        for output, shape in zip(call.outputs, self._shapes, strict=True):
            output.set_shape(shape)
        return dict(zip(self._outputs, call.outputs, strict=True))


def cut(
    nodes: Sequence[tf.compat.v1.NodeDef],
    sync_points: Sequence[tuple[Sequence[str], Sequence[str]]],
    inputs: Iterable[str],
    wanted: Sequence[str],
    stateful: Set[str] = frozenset(),
) -> list[Stage]:
    """The stages of a step: one more than sync points.

    Args:
        nodes: in the order in which they were made. Inputs of a node may be made after it.
        sync_points: in order, (values of a replica, as "name:number"; names of the placeholders
            of the results).
        inputs: names of the input nodes of the graph.
        wanted: the tensors that the step returns, as "name:number".
        stateful: names of nodes that have effects.

    Raises:
        NotSharedError: a tensor is needed for a sum over replicas that it depends on.
    """
    by_name = {node.name: node for node in nodes}
    results = {name: i for i, (_, names) in enumerate(sync_points, 1) for name in names}
    leaving = [*(tensor for values, _ in sync_points for tensor in values), *wanted]
    made_in: dict[str, int] = {}
    current = 0
    for node in nodes:
        current = made_in[node.name] = results.get(node.name, current)

    order = TopologicalSorter({name: _sources(node) for name, node in by_name.items()})
    outside = {*inputs, *results}
    wanted_nodes = {*stateful, *map(_node_of, leaving)}
    stage_of: dict[str, int] = {}
    needed: dict[str, int] = {}  # the first stage that uses a node
    for name in reversed([*order.static_order()]):
        if name not in outside and (name in needed or name in wanted_nodes):
            stage_of[name] = stage = min(made_in[name], needed.get(name, made_in[name]))
            for source in _sources(by_name[name]):
                needed[source] = min(needed.get(source, stage), stage)
    for name, number in results.items():
        if needed.get(name, number) < number:
            raise NotSharedError(
                f"the step uses the sum over replicas {name!r} before the sum is computed"
            )

    stages = _stages(by_name, stage_of, len(sync_points) + 1)
    for tensor in leaving:
        if (source := _node_of(tensor)) in stage_of:
            stages[stage_of[source]].outputs[tensor] = None
    return stages


def _stages(
    by_name: Mapping[str, tf.compat.v1.NodeDef], stage_of: Mapping[str, int], count: int
) -> list[Stage]:
    """The stages, with the tensors that they pass to each other."""
    stages = [Stage(set(), {}, {}) for _ in range(count)]
    for name, number in stage_of.items():
        stages[number].nodes.add(name)
        for tensor in map(_tensor_name, by_name[name].input):
            source = _node_of(tensor)
            if not tensor.startswith("^") and stage_of.get(source) != number:
                stages[number].inputs[tensor] = None
                if source in stage_of:
                    stages[stage_of[source]].outputs[tensor] = None
    return stages


def _tensor_name(name: str) -> str:
    """An input of a node as "name:number"; a control input "^name" is returned as "^name:0"."""
    return name if ":" in name else f"{name}:0"


def _sources(node: tf.compat.v1.NodeDef) -> list[str]:
    """Names of the nodes that a node takes tensors from or waits for."""
    return [_node_of(name.removeprefix("^")) for name in node.input]


def _node_of(tensor: str) -> str:
    return tensor.split(":")[0]


def _placeholder_names(stage: Stage) -> dict[str, str]:
    """The tensors that stand for the inputs of a stage, by the names of the inputs in the trace."""
    return {name: f"input_of_stage_{number}:0" for number, name in enumerate(stage.inputs)}


def _optimized(
    stage: Stage,
    graph: tf.Graph,
    definition: tf.compat.v1.GraphDef,
    device: str,
    jit_compile: bool,
) -> tf.compat.v1.GraphDef | None:
    """The nodes of a stage, optimized for a device but bound to none; None if it does nothing.

    The stage's inputs are named as in `_placeholder_names`. XLA gets the nodes as they are, and
    optimizes them itself.

    Raises:
        NotSharedError: TensorFlow cannot optimize the stage by itself.
    """
    effects = [op.name for op in graph.control_outputs if op.name in stage.nodes]
    if not stage.outputs and not effects:
        return None
    names = _placeholder_names(stage)
    part = tf.compat.v1.GraphDef(versions=definition.versions, library=definition.library)
    for node in definition.node:
        if node.name in stage.nodes:
            copy = part.node.add()
            copy.CopyFrom(node)
            copy.device = node.device or device
            copy.attr.pop("_class", None)  # a device beside a node that may be in another stage
            # A node of an earlier stage is done before this stage, so nothing waits for it.
            waits = [name for name in node.input if name.startswith("^")]
            taken = [
                names.get(_tensor_name(name), name) for name in node.input if name not in waits
            ]
            copy.input[:] = [*taken, *(name for name in waits if name[1:] in stage.nodes)]
    placeholders = {placeholder.removesuffix(":0"): name for name, placeholder in names.items()}
    for placeholder, name in placeholders.items():
        tensor = graph.get_tensor_by_name(name)
        node = part.node.add(name=placeholder, op="Placeholder", device=device)
        node.attr["dtype"].type = tensor.dtype.as_datatype_enum
        node.attr["shape"].shape.CopyFrom(tensor.shape.as_proto())
    if not jit_compile:
        try:
            part = _tf_private.optimized(part, [*stage.outputs, *effects, *placeholders], device)
        except StrategyError:
            raise
        except ValueError as error:
            raise NotSharedError(
                f"TensorFlow cannot optimize a part of the step: {error}"
            ) from error
    kept = [node for node in part.node if node.name not in placeholders]
    for node in kept:
        node.device = "" if node.device == device else node.device
        node.input[:] = [name for name in node.input if name[1:] not in placeholders]
    return tf.compat.v1.GraphDef(node=kept, versions=part.versions, library=part.library)


def _leaves(structure: Any) -> list[tf.Tensor]:
    flat = tf.nest.flatten(structure, expand_composites=True)
    return [leaf for leaf in flat if leaf is not None]


def _on_device(device: str, tensor: tf.Tensor) -> tf.Tensor:
    """The tensor with a known device, because reductions depend on the device."""
    if tensor.device:
        return tensor
    with tf.device(device):
        return tf.identity(tensor)


def _of_known_shape(value: Any, traced: Any) -> Any:
    """IndexedSlices with the dense shape that was known at trace time."""
    if not isinstance(traced, tf.IndexedSlices) or not traced.shape.is_fully_defined():
        return value
    shape = tf.constant(traced.shape.as_list(), traced.dense_shape.dtype)
    return tf.IndexedSlices(value.values, value.indices, shape)


def _packed(structure: Any, leaves: Iterable[tf.Tensor]) -> Any:
    """The structure with other tensors as its leaves, in the order of `_leaves`."""
    rest = iter(leaves)
    flat = tf.nest.flatten(structure, expand_composites=True)
    tensors = [None if leaf is None else next(rest) for leaf in flat]
    return tf.nest.pack_sequence_as(structure, tensors, expand_composites=True)


def kind_of(args: Sequence[Sequence[Any]]) -> tuple[Any, ...]:
    """The cache key of a trace: the structure of the arguments, and the specs of tensors."""
    return str(tf.nest.map_structure(type, args[0])), *_specs(args)


def _specs(args: Sequence[Sequence[Any]]) -> list[tf.TensorSpec]:
    """For each tensor of a replica's arguments, a spec that holds for all replicas."""
    specs = [[tf.TensorSpec(x.shape, x.dtype) for x in tensors] for tensors in map(_leaves, args)]
    return [
        first.most_specific_common_supertype(others) for first, *others in zip(*specs, strict=True)
    ]
