"""Each private name that placement uses does what is used of it.

When a release of Keras or TensorFlow changes one, the test that fails names it. That variables in
shards have one gradient and are updated by shards: training/parameter_server.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist_ext.placement.live._keras_private import (
    fresh_names,
    leaving_no_names,
    optimizer_behind,
    variable_behind,
)
from tfdist_ext.placement.live._tf_private import partitioned_variable_class

pytestmark = pytest.mark.usefixtures("four_cpus")


def test_what_keras_gives_tensorflow_for_a_variable() -> None:
    seen: list[Any] = []

    def creator(next_creator: Any, **kwargs: Any) -> Any:
        seen.append(variable_behind(kwargs["initial_value"]))
        return next_creator(**kwargs)

    initializer = keras.initializers.Ones()
    with tf.variable_creator_scope(creator):
        variable = keras.Variable(initializer, shape=(2, 3), dtype="float32", name="mine")
        keras.Variable(1.0)
        tf.Variable(lambda: tf.zeros([2]))
    closure, *others = seen
    assert closure is not None, (
        f"Keras {keras.__version__} no longer hands tf.Variable a function that closes over the"
        " variable and its initializer: placement cannot know shapes and paths"
    )
    assert closure[0] is variable
    assert closure[1] is initializer
    assert others == [None, None]


def test_names_begin_anew_and_go_on() -> None:
    keras.utils.clear_session()
    assert keras.layers.Dense(1).name == "dense"
    with fresh_names():
        names = [keras.layers.Dense(1).name for _ in range(3)]
    assert names == ["dense", "dense_1", "dense_2"], (
        f"Keras {keras.__version__} keeps its counters of names elsewhere"
    )
    assert keras.layers.Dense(1).name == "dense_3"  # no name is given twice from here on
    with leaving_no_names():
        assert keras.layers.Dense(1).name == "dense"
        keras.random.uniform([1])
    assert keras.layers.Dense(1).name == "dense_4"


def test_a_variable_of_shared_pieces() -> None:
    """What Keras asks a tf.Variable for, and TensorFlow's class has not."""
    with tf.distribute.experimental.CentralStorageStrategy(["CPU:0", "CPU:1"], "CPU:2").scope():
        pieces = [tf.Variable(tf.ones([2, 3])), tf.Variable(tf.zeros([1, 3]))]
    variable = partitioned_variable_class()(pieces, "both", "layer/both")
    assert np.array(variable).sum() == 6
    assert variable.device == pieces[0].device
    assert [*variable.get().variables] == [piece.get() for piece in pieces]
    assert not hasattr(variable, "handle"), (
        f"the ShardedVariable of TensorFlow {tf.__version__} has a handle"
    )
    with tf.GradientTape() as tape:
        total = tf.reduce_sum(variable)
    with pytest.raises(AttributeError, match="'layer/both' has no single gradient"):
        tape.gradient(total, variable)


def test_the_optimizer_behind_an_update() -> None:
    optimizer = keras.optimizers.SGD(0.5)
    seen: list[Any] = []

    class Strategy:
        @property
        def extended(self) -> Any:
            return self

        def update(self, var: Any, fn: Any, args: Any = (), group: bool = True) -> None:
            seen.append(optimizer_behind(fn))

    variable = keras.Variable([1.0, 2.0])
    optimizer.build([variable])
    optimizer._distributed_tf_update_step(Strategy(), [(tf.ones([2]), variable.value)], 0.5)
    assert seen == [optimizer], (
        f"Keras {keras.__version__} no longer hands a strategy a function that closes over the"
        " optimizer: updates of variables in shards would read whole variables"
    )
    assert optimizer_behind(lambda variable: variable) is None
