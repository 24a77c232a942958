"""The `extended` of a StrategyTemplate: TensorFlow calls it, and it calls the template's hooks.

MirroredStrategy's own methods do what no hook decides: threads of replicas, datasets, containers
of values. TensorFlow leaves the methods with an underscore to each strategy.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist_ext.errors import StrategyError
from tfdist_ext.messages import shown
from tfdist_ext.placement.live._tf_private import partitioned_variable_class
from tfdist_ext.placement.live.creating import Where, is_partitioned, made_in_pieces, pieces_of
from tfdist_ext.placement.live.initial_values import InitialValue
from tfdist_ext.strategies import _tf_private
from tfdist_ext.strategies.one_machine import pick_devices
from tfdist_ext.strategies.reductions import OTHER, Reduced


class TemplateExtended(tf.distribute.StrategyExtended):
    """One replica for each device of a StrategyTemplate. Calls the hooks and checks their results.

    `mirrored_class` adds the methods of MirroredStrategy below it.
    """

    # Batches may be of unequal size, and the last one may leave replicas without rows.
    experimental_enable_get_next_as_optional = True

    def __init__(self, strategy: tf.distribute.Strategy, devices: Sequence[str]):
        """
        Args:
            devices: full names, one for each replica.
        """
        # Not MirroredStrategy's: it reads TF_CONFIG, and makes collectives that nothing uses.
        tf.distribute.StrategyExtended.__init__(self, strategy)
        self._devices = tuple(devices)
        self._input_workers_devices = ((_tf_private.full_name("/device:CPU:0"), self._devices),)
        self._communication_options = tf.distribute.experimental.CommunicationOptions()

    def _use_merge_call(self) -> bool:
        return True  # the hooks run in cross-replica context

    def _get_cross_device_ops(self, value: Any) -> tf.distribute.CrossDeviceOps:
        return tf.distribute.ReductionToOneDevice()

    # Variables

    def _create_variable(
        self, next_creator: Callable[..., tf.Variable], **kwargs: Any
    ) -> tf.Variable:
        strategy = self._container_strategy()
        beside = kwargs.pop("colocate_with", None)
        initial = None
        # Each replica has its own value of a metric (ON_READ); reading aggregates the values.
        if kwargs.get("synchronization") != tf.VariableSynchronization.ON_READ:
            initial = _initial_value(kwargs, self._devices[0])
        # One variable with a copy on each device, which begin equal.
        copied = functools.partial(super()._create_variable, next_creator)
        if initial is None:
            return copied(**kwargs)
        spec = initial.spec
        call = f"{type(strategy).__name__}.create_variable({spec.path!r})"
        created: list[tf.Variable] = []

        def create(devices: Sequence[str], *, in_pieces: bool = False) -> tf.Variable:
            picked = pick_devices(call, devices)
            names = [_tf_private.full_name(name) for name in picked]
            if in_pieces and len(picked) > 1:
                made = self._in_pieces(next_creator, kwargs, initial, names)
            elif picked == list(strategy.devices):
                made = copied(**kwargs)
            elif len(picked) == 1:
                made = self._shared(next_creator, names[0], **kwargs)
            else:
                raise StrategyError(
                    f"{call}: create() must get one device for all replicas, or the devices of all"
                    f" replicas in their order, {list(strategy.devices)}, got {picked}. With"
                    " in_pieces=True, pass the device of each piece."
                )
            created.append(made)
            return made

        made = strategy.create_variable(spec, create, beside)
        if not any(made is variable for variable in created):
            wanted = f"the variable that create() makes of {spec.path!r}"
            raise _wrong(strategy, "create_variable", wanted, made)
        return made

    def _shared(
        self,
        next_creator: Callable[..., tf.Variable],
        device: str,
        aggregation: tf.VariableAggregation = tf.VariableAggregation.NONE,
        **kwargs: Any,
    ) -> tf.Variable:
        """One plain variable on a device, for all replicas.

        Without an aggregation it takes the value that the first replica writes.
        """
        with _tf_private.across(device), _tf_private.outside_of_tapes():
            plain = next_creator(**kwargs)
        if aggregation in (None, tf.VariableAggregation.NONE):
            aggregation = tf.VariableAggregation.ONLY_FIRST_REPLICA
        return _tf_private.shared_variable(self._container_strategy(), plain, aggregation)

    def _in_pieces(
        self,
        next_creator: Callable[..., tf.Variable],
        kwargs: dict[str, Any],
        initial: InitialValue,
        devices: list[str],
    ) -> tf.Variable:
        """One variable in even pieces along axis 0, one on each device, for all replicas."""
        spec = initial.spec
        if spec.rows < len(devices):
            raise StrategyError(
                f"create() cannot cut {spec.path!r} of shape {list(spec.shape)} into"
                f" {len(devices)} pieces. Give it fewer devices."
            )
        where: Where = [
            (devices[number], start, stop, {"device": devices[number]})
            for number, start, stop in spec.shards(range(len(devices)))
        ]
        create = functools.partial(self._shared, next_creator)
        pieces = made_in_pieces(create, kwargs, initial, where)
        return partitioned_variable_class()(pieces, kwargs.get("name") or "Variable", spec.path)

    def _validate_colocate_with_variable(self, colocate_with_variable: tf.Variable) -> None:
        pass  # MirroredStrategy's method does not take a variable that replicas share

    def value_container(self, value: Any) -> Any:
        return _tf_private.container_of(value)

    def read_var(self, v: tf.Variable) -> tf.Tensor:
        """The value of a variable outside of replicas."""
        # MirroredStrategy's method does not take a variable that replicas share.
        has_copies = isinstance(v, tf.distribute.DistributedValues)
        return super().read_var(v) if has_copies else tf.identity(v)

    def _update(
        self, var: tf.Variable, fn: Callable[..., Any], args: Any, kwargs: Any, group: bool
    ) -> Any:
        strategy = self._container_strategy()
        # A variable in pieces counts as one copy; each piece is assigned on its device.
        copies = (var.get(),) if is_partitioned(var) else strategy.copies(var)

        def update(number: int) -> Any:
            copy = copies[number]
            name = tf.name_scope(f"update_{number}")
            with tf.device(getattr(copy, "device", None)), _tf_private.updating(number), name:
                own_args, own_kwargs = _tf_private.of_replica(number, (tuple(args), kwargs))
                return fn(copy, *own_args, **own_kwargs)

        if _tf_private.is_synchronized_on_read(var):
            results = [update(number) for number in range(len(copies))]
        else:
            results = strategy.update_variable(var, copies, update)
            if not _is_list_of(len(copies), results):
                wanted = f"a list of {len(copies)} results of update(), one for each copy of"
                raise _wrong(strategy, "update_variable", f"{wanted} {var.name!r}", results)
        return _tf_private.results_of_update(self, results, group)

    # Values

    def _reduce_to(
        self, reduce_op: tf.distribute.ReduceOp, value: Any, destinations: Any, options: Any
    ) -> Any:
        inherited = super()._reduce_to

        def reduced(value: Any) -> Any:
            if _tf_private.is_mirrored(value) or not isinstance(
                value, tf.distribute.DistributedValues
            ):
                return inherited(reduce_op, value, destinations, options)
            return self._reduced(reduce_op, value.values, destinations, what)

        what = _what(value, destinations)
        return tf.nest.map_structure(reduced, value)

    def _batch_reduce_to(
        self, reduce_op: tf.distribute.ReduceOp, value_destination_pairs: Any, options: Any
    ) -> Any:
        return [
            self._reduce_to(reduce_op, *self._per_replica(*pair), options)
            for pair in value_destination_pairs
        ]

    def batch_reduce_described(
        self, op: tf.distribute.ReduceOp, pairs: Any, what: Sequence[Reduced]
    ) -> list[Any]:
        """`batch_reduce_to` of values with their descriptions, in cross-replica context."""
        reduced = []
        for pair, description in zip(pairs, what, strict=True):
            value, destinations = self._per_replica(*pair)
            variable = description.variable
            if description.kind == "gradient" and self._is_updated_once(variable):
                destinations = pieces_of(self.owner_copy(variable))[0][0].device
            reduced.append(self._reduced(op, value.values, destinations, description))
        return reduced

    def _is_updated_once(self, variable: tf.Variable) -> bool:
        strategy = self._container_strategy()
        copies = len(strategy.experimental_local_results(variable))
        return strategy.has_own_updates or copies < len(self._devices)

    def owner_copy(self, variable: tf.Variable) -> tf.Variable:
        """The copy, a plain tf.Variable, on which one update for all replicas is computed."""
        strategy = self._container_strategy()
        copies = strategy.experimental_local_results(variable)
        number, count = strategy.owner(variable), len(self._devices)
        if number not in range(count):
            wanted = f"the index of a device, from 0 to {count - 1}, for {variable.name!r}"
            raise _wrong(strategy, "owner", wanted, number)
        copy = copies[number % len(copies)]
        # One copy for all replicas comes in a wrapper that insists on its strategy.
        return copy.get() if hasattr(copy, "get") else copy

    def _per_replica(self, value: Any, destinations: Any) -> tuple[Any, Any]:
        """A value per replica, and where it is needed; a tensor comes from every replica alike."""
        if isinstance(value, tf.distribute.DistributedValues):
            return value, destinations
        # The tensor may be on no device, and its device does not matter.
        copies = [_tf_private.copied_to(device, value) for device in self._devices]
        value = _tf_private.per_replica(copies, always=True)
        return value, value

    def _reduced(
        self,
        op: tf.distribute.ReduceOp,
        parts: Sequence[_tf_private.Value],
        destinations: Any,
        what: Reduced,
    ) -> Any:
        strategy = self._container_strategy()
        devices = _tf_private.devices_of(destinations)
        parts = tuple(  # a copy of a variable is read where it is
            part if isinstance(part, tf.IndexedSlices) else tf.convert_to_tensor(part)
            for part in parts
        )
        results = strategy.reduce_values(op, parts, devices, what)
        if not _is_list_of(len(devices), results):
            wanted = f"a list of {len(devices)} values, one for each destination device"
            raise _wrong(strategy, "reduce_values", wanted, results)
        for result in results:
            slices = isinstance(parts[0], tf.IndexedSlices) or isinstance(result, tf.IndexedSlices)
            if not tf.is_tensor(result) or not (slices or _alike(result, parts[0])):
                wanted = (
                    f"values of the shape and dtype of its arguments, such as {shown(parts[0])}"
                )
                raise _wrong(strategy, "reduce_values", wanted, result)
        there = [
            result if result.device == device else _tf_private.copied_to(device, result)
            for device, result in zip(devices, results, strict=True)
        ]
        return there[0] if len(there) == 1 else _tf_private.per_replica(there, mirrored=True)


def _initial_value(kwargs: dict[str, Any], device: str) -> InitialValue | None:
    """The initial value of a variable, which is computed if `kwargs` have no shape.

    None if the shape is not known before the variable is created, or the value comes from a
    SavedModel.
    """
    value = kwargs["initial_value"]
    if hasattr(value, "checkpoint_position"):  # from a checkpoint that was restored before
        value = value() if callable(value) else value
        kwargs["initial_value"] = value = value.wrapped_value
    if value is None or (tf.is_tensor(value) and not value.shape.is_fully_defined()):
        return None
    initial = InitialValue(kwargs, where=device)
    kwargs["initial_value"] = initial.value
    return initial


def _what(value: Any, destinations: Any) -> Reduced:
    """Describes the value of a reduction whose caller has not described it."""
    if _tf_private.is_synchronized_on_read(value):
        return Reduced(kind="metric", variable=value, path=value.name.removesuffix(":0"))
    if isinstance(destinations, tf.Variable):
        name = destinations.name.removesuffix(":0")
        return Reduced(kind="assignment", variable=destinations, path=name)
    return OTHER


def _is_list_of(length: int, value: object) -> bool:
    return isinstance(value, list | tuple) and len(value) == length


def _alike(value: Any, other: Any) -> bool:
    """Whether shape and dtype fit. The mean of integers has another dtype."""
    same_dtype = value.dtype == other.dtype or not other.dtype.is_floating
    return same_dtype and other.shape.is_compatible_with(value.shape)


def _wrong(
    strategy: tf.distribute.Strategy, hook: str, wanted: str, returned: object
) -> StrategyError:
    return StrategyError(
        f"{type(strategy).__name__}.{hook} must return {wanted}, got {shown(returned)}."
    )
