"""The states of metrics that a loop in the graph carries, stacked."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdist_ext.training.steps.scope import ReplicaScope
from tfdist_ext.training.synchronous.reduction import StackedStates


@given(
    st.lists(
        st.tuples(
            st.sampled_from([(), (3,), (1,), (2, 2), (5000,)]),
            st.sampled_from(["float32", "int32", "bool"]),
            st.sampled_from(["sum", "mean"]),
        ),
        max_size=8,
    )
)
@settings(deadline=None, max_examples=20)
def test_states_of_metrics_are_stacked_and_come_back(kinds: list[tuple[Any, str, str]]) -> None:
    values = [np.full(shape, i % 2).astype(dtype) for i, (shape, dtype, _) in enumerate(kinds)]
    variables = [
        keras.Variable(value, dtype=value.dtype.name, aggregation=aggregation)
        for value, (*_, aggregation) in zip(values, kinds, strict=True)
    ]
    stacked = StackedStates(variables)
    few = stacked.stack([tf.constant(value) for value in values])
    large = sum(shape == (5000,) for shape, *_ in kinds)  # copying one takes longer than sending it
    assert len(few) == len({kind for kind in kinds if kind[0] != (5000,)}) + large
    for back, value in zip(stacked.unstack(few), values, strict=True):
        assert back.dtype == value.dtype
        np.testing.assert_array_equal(back, value)


class _HasRows:
    """What `StackedStates` asks of a step's context, for a replica with rows or without."""

    def __init__(self, rows: tf.Tensor):
        self.rows = rows

    def where_nonempty(self, value: tf.Tensor, otherwise: tf.Tensor) -> tf.Tensor:
        return tf.where(self.rows > 0, value, otherwise)


@pytest.mark.parametrize(
    ("last", "expected", "additions"),
    [
        pytest.param(lambda state: state + 5.0, 7.0, 1, id="added to"),
        pytest.param(lambda state: 5.0 + state, 7.0, 3, id="added to something"),
        pytest.param(lambda state: state * 5.0, 10.0, 2, id="multiplied"),
        pytest.param(lambda state: state + state, 4.0, 1, id="added to itself"),
        pytest.param(lambda state: state, 2.0, 2, id="left alone"),
    ],
)
def test_states_to_which_a_step_adds_take_one_addition(
    last: Any, expected: float, additions: int
) -> None:
    variables = [keras.Variable(value, aggregation="sum") for value in (0.0, 1.0, 2.0)]
    stacked = StackedStates(variables)

    @tf.function(input_signature=[tf.TensorSpec([3]), tf.TensorSpec([], tf.int32)], autograph=False)
    def step(begun: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
        with ReplicaScope(zip(variables, stacked.unstack([begun]), strict=True)) as scope:
            variables[0].assign_add(3.0)
            variables[1].assign_add(4.0)
            variables[2].assign(last(variables[2].value))
        (after,) = stacked.after_step(scope, _HasRows(rows), [begun])
        return after

    begun = tf.constant([0.0, 1.0, 2.0])
    np.testing.assert_array_equal(step(begun, 1), [3.0, 5.0, expected])
    np.testing.assert_array_equal(step(begun, 0), begun)
    used = {output.op for output in step.get_concrete_function().graph.outputs}
    while new := {tensor.op for operation in used for tensor in operation.inputs} - used:
        used |= new
    assert sum(operation.type == "AddV2" for operation in used) == additions
