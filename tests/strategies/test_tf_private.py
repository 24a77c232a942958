"""Each private name of TensorFlow that strategies use is there and does what is used of it.

When a release of TensorFlow moves one, the test that fails names it and says what it was for.
"""

from __future__ import annotations

import pytest
import tensorflow as tf

from tfdist_ext.strategies import StrategyTemplate, _tf_private


@pytest.mark.parametrize("name", _tf_private.NAMES.uses)
def test_names_in_modules(name: str) -> None:
    assert _tf_private.NAMES(name) is not None


def test_fields_of_the_mirrored_strategy() -> None:
    """What its constructor sets, and ours in its place."""
    mirrored = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).extended
    ours = StrategyTemplate(2).extended
    for name in ("_devices", "_input_workers_devices", "experimental_enable_get_next_as_optional"):
        assert getattr(mirrored, name) == getattr(ours, name)
    assert isinstance(ours._communication_options, type(mirrored._communication_options))


def test_numbers_of_distributed_variables() -> None:
    """Where TensorFlow converts them by itself one day, ours may go."""
    kind = _tf_private.NAMES("distribute.values.DistributedVariable")
    for scalar in (float, int, complex):
        name = f"__{scalar.__name__}__"
        assert not hasattr(kind, name), f"TensorFlow {tf.__version__} has {scalar}"
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        variable = _tf_private.with_scalar_conversions(tf.Variable(2.5))
        other = tf.Variable(2.5)
    assert (float(variable), int(variable), complex(variable)) == (2.5, 2, 2.5 + 0j)
    assert isinstance(variable, type(other))
    assert _tf_private.with_scalar_conversions(variable) is variable
    with pytest.raises(TypeError):
        float(other)  # a variable that is not of our making is as TensorFlow made it
    plain = tf.Variable(1.0)
    assert type(_tf_private.with_scalar_conversions(plain)) is type(plain)


def test_the_container_of_a_shared_variable() -> None:
    shared = _tf_private.shared_variable(
        StrategyTemplate(2), tf.Variable(1.0), tf.VariableAggregation.SUM
    )
    assert _tf_private.container_of(shared.get()) is shared
    assert shared.get()._aggregating_container() is shared
