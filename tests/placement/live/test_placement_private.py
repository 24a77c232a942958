"""Each private name that placement uses is there and does what is used of it.

When a release of Keras or TensorFlow moves one, the test that fails names it.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist_ext.placement.live import _keras_private, _tf_private
from tfdist_ext.placement.live._keras_private import (
    fresh_names,
    leaving_no_names,
    optimizer_behind,
    variable_behind,
)
from tfdist_ext.placement.live._tf_private import (
    as_piece,
    partitioned_variable_class,
    server_variable_class,
)
from tfdist_ext.private_names import PrivateNames

pytestmark = pytest.mark.usefixtures("four_cpus")


@pytest.mark.parametrize("names", [_tf_private.NAMES, _keras_private.NAMES])
def test_names_in_modules(names: PrivateNames) -> None:
    for name in names.uses:
        assert names(name) is not None


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
    found, *others = seen
    assert found is not None, (
        f"Keras {keras.__version__} no longer hands tf.Variable a function that closes over the"
        " variable and its initializer: placement cannot know shapes and paths"
    )
    assert found[0] is variable
    assert found[1] is initializer
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


def test_a_tape_takes_pieces_for_one_variable() -> None:
    """In pieces of different sizes; dense, by rows, and both."""
    pieces = [tf.Variable(tf.ones([rows, 2])) for rows in (3, 1, 2)]
    whole = server_variable_class()(pieces, name="whole")

    @tf.function
    def loss(ids: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(tf.gather(tf.convert_to_tensor(whole), ids) * [[1.0, 2.0]])

    for _ in range(2):  # the second time the function is not traced
        with tf.GradientTape() as tape:
            value = loss(tf.constant([0, 5, 5]))
        found = tf.convert_to_tensor(tape.gradient(value, whole.handle))
        assert found.numpy().tolist() == [[1, 2], [0, 0], [0, 0], [0, 0], [0, 0], [2, 4]]
    with tf.GradientTape() as tape:
        value = loss(tf.constant([3])) + tf.reduce_sum(pieces[2] * 3.0) + tf.reduce_sum(whole[:3])
    gradient, of_piece = tape.gradient(value, [whole.handle, pieces[2]])
    expected = [[1, 1], [1, 1], [1, 1], [1, 2], [3, 3], [3, 3]]
    assert tf.convert_to_tensor(gradient).numpy().tolist() == expected
    assert tf.convert_to_tensor(of_piece).numpy().tolist() == [[3, 3], [3, 3]]


def test_an_update_of_a_piece_changes_that_piece() -> None:
    whole = server_variable_class()(
        [tf.Variable(tf.zeros([rows, 1])) for rows in (3, 3, 2)], name="whole"
    )
    whole.scatter_add(tf.IndexedSlices(tf.constant([[1.0], [2.0], [3.0]]), tf.constant([7, 3, 0])))
    assert np.asarray(whole)[:, 0].tolist() == [3, 0, 0, 2, 0, 0, 0, 1]
    with as_piece(2):
        whole.assign_add([[10.0], [20.0]])
        whole.scatter_sub(tf.IndexedSlices(tf.constant([[5.0]]), tf.constant([1])))
        assert tf.convert_to_tensor(whole).numpy()[:, 0].tolist() == [10, 16]
    assert np.asarray(whole)[:, 0].tolist() == [3, 0, 0, 2, 0, 0, 10, 16]
