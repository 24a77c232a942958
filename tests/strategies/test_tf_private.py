"""Each private name of TensorFlow that strategies use does what is used of it.

If a release of TensorFlow moves a name, the failing test shows the name and its purpose.
"""

from __future__ import annotations

import tensorflow as tf

from tfdist_ext.strategies import StrategyTemplate, _tf_private


def test_fields_of_the_mirrored_strategy() -> None:
    """What its constructor sets, and ours in its place."""
    mirrored = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).extended
    ours = StrategyTemplate(2).extended
    for name in ("_devices", "_input_workers_devices", "experimental_enable_get_next_as_optional"):
        assert getattr(mirrored, name) == getattr(ours, name)
    assert isinstance(ours._communication_options, type(mirrored._communication_options))


def test_tensorflow_does_not_convert_distributed_variables_to_numbers() -> None:
    """Where it does one day, `with_scalar_conversions` may go."""
    kind = _tf_private.NAMES("distribute.values.DistributedVariable")
    for scalar in (float, int, complex):
        name = f"__{scalar.__name__}__"
        assert not hasattr(kind, name), f"TensorFlow {tf.__version__} has {scalar}"
