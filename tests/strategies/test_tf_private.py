"""Each private name of TensorFlow that strategies use is there and does what is used of it.

When a release of TensorFlow moves one, the test that fails names it and says what it was for.
"""

from __future__ import annotations

import importlib

import numpy as np
import pytest
import tensorflow as tf

from tfdist_ext.strategies import StrategyTemplate
from tfdist_ext.strategies import _tf_private as tp
from tfdist_ext.strategies.template_extended import TemplateExtended


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("distribute.cross_device_ops.get_devices_from", "where a reduction is wanted"),
        ("distribute.cross_device_ops.reduce_non_distributed_value", "reducing a plain value"),
        ("distribute.cross_device_ops.validate_destinations", "where a reduction is wanted"),
        (
            "distribute.cross_device_utils.aggregate_tensors_or_indexed_slices",
            "adding tensors or slices",
        ),
        (
            "distribute.cross_device_utils.copy_tensor_or_indexed_slices_to_device",
            "sending tensors or slices",
        ),
        ("distribute.cross_device_utils.divide_by_n_tensors_or_indexed_slices", "means"),
        ("distribute.device_util.canonicalize", "full names of devices"),
        ("distribute.distribute_lib.UpdateContext", "updates of copies"),
        ("distribute.distribute_lib.enter_or_assert_strategy", "reading outside of the scope"),
        ("distribute.distribute_utils.VARIABLE_POLICY_MAPPING", "making copied variables"),
        ("distribute.distribute_utils.create_mirrored_variable", "making copied variables"),
        ("distribute.distribute_utils.is_mirrored", "values that are equal on all replicas"),
        ("distribute.distribute_utils.regroup", "values per replica"),
        ("distribute.distribute_utils.select_replica", "values per replica"),
        ("distribute.distribute_utils.update_regroup", "results of updates"),
        ("distribute.distribute_utils.validate_colocate", "colocate_vars_with"),
        ("distribute.distribute_utils.value_container", "the variable behind a copy"),
        ("distribute.input_lib.InputWorkers", "distributed datasets"),
        ("distribute.input_util.get_distributed_dataset", "distributed datasets"),
        ("distribute.input_util.get_distributed_datasets_from_function", "distributed datasets"),
        ("distribute.mirrored_run.call_for_each_replica", "the replicas' threads"),
        (
            "distribute.parameter_server_strategy_v2.ParameterServerStrategyV2Extended",
            "updates of variables in shards",
        ),
        ("distribute.ps_values.AggregatingVariable", "a variable that replicas share"),
        ("distribute.values.DistributedVariable", "float() and int() of variables"),
        ("distribute.values.Mirrored", "values that are equal on all replicas"),
        ("distribute.values.MirroredVariable", "variables with a copy on each replica"),
        ("distribute.values.PerReplica", "values per replica"),
        ("distribute.values.SyncOnReadVariable", "metrics"),
        ("distribute.values_util.get_current_replica_id_as_int", "reading outside of replicas"),
        ("distribute.values_util.is_saving_non_distributed", "saving"),
        ("eager.context.DEVICE_PLACEMENT_SILENT", "copies from device to device"),
        ("eager.context.device_policy", "copies from device to device"),
        ("eager.record.stop_recording", "initial values unseen by tapes"),
    ],
)
def test_names_in_modules(name: str, why: str) -> None:
    module, _, attribute = name.rpartition(".")
    found = getattr(importlib.import_module(f"tensorflow.python.{module}"), attribute, None)
    assert found is not None, f"TensorFlow {tf.__version__} moved {name}, used for {why}"


@pytest.mark.parametrize(
    "name",
    [
        "_batch_reduce_to",
        "_create_variable",
        "_distribute_datasets_from_function",
        "_experimental_distribute_dataset",
        "_experimental_distribute_values_from_function",
        "_gather_to_implementation",
        "_in_multi_worker_mode",
        "_num_replicas_in_sync",
        "_reduce_to",
        "_update",
        "_validate_colocate_with_variable",
        "parameter_devices",
        "value_container",
        "worker_devices",
    ],
)
def test_what_the_public_base_leaves_to_its_descendants(name: str) -> None:
    assert hasattr(tf.distribute.StrategyExtended, name), (
        f"StrategyExtended of TensorFlow {tf.__version__} no longer asks for {name}"
    )
    assert name in vars(TemplateExtended)


def test_what_the_public_base_lacks() -> None:
    """FACTS of TensorFlow 2.21: if one of these is public one day, ours may go."""
    for name in ("call_for_each_replica", "broadcast_to", "read_var", "_use_merge_call"):
        assert not hasattr(tf.distribute.StrategyExtended, name)
        assert hasattr(TemplateExtended, name)


def test_numbers_of_distributed_variables() -> None:
    """Where TensorFlow converts them by itself one day, ours may go."""
    for scalar in (float, int, complex):
        method = getattr(tp.values.DistributedVariable, f"__{scalar.__name__}__")
        assert method.__module__ == tp.__name__, f"TensorFlow {tf.__version__} has {scalar}"
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        variable = tf.Variable(2.5)
    assert (float(variable), int(variable), complex(variable)) == (2.5, 2, 2.5 + 0j)


def test_methods_of_copied_variables() -> None:
    for name in ("_get", "_get_cross_replica", "value"):
        assert hasattr(tp.CopiedVariable.__mro__[1], name), f"MirroredVariable.{name} is gone"
    with StrategyTemplate(2).scope():
        variable = tf.Variable([1.0, 2.0])
    assert isinstance(variable, tp.CopiedVariable)
    assert variable._primary is variable.values[0]
    np.testing.assert_array_equal(np.array(variable), [1, 2])
    shared = tp.shared_variable(StrategyTemplate(2), tf.Variable(1.0), tf.VariableAggregation.SUM)
    assert tp.container_of(shared.get()) is shared
    assert shared.get()._aggregating_container() is shared
