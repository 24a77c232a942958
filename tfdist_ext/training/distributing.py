"""distribute: a Keras model, or what builds it, and a strategy."""

from __future__ import annotations

from collections.abc import Callable

import keras
import tensorflow as tf

from tfdist_ext.errors import TrainingError
from tfdist_ext.strategies import create_strategy
from tfdist_ext.training.adopt import adopt
from tfdist_ext.training.model import DistributedModel
from tfdist_ext.training.same_model import variables_made_together

__all__ = ["distribute"]


def distribute(
    model_or_builder: keras.Model | Callable[[], keras.Model],
    strategy: tf.distribute.Strategy | None = None,
) -> DistributedModel:
    """Put a Keras model on a strategy.

    Args:
        model_or_builder: a function without arguments that returns a model (compiled or not),
            or an existing model, trained or not. Of an existing model a copy is made, with its
            weights, compile settings and optimizer state; the original stays as it is.
        strategy: any `tf.distribute.Strategy`; by default the one whose scope is open, else
            `create_strategy()`.

    Raises:
        TrainingError: not a model, one that cannot be copied from its config, or a strategy
            that is none.
    """
    if strategy is not None and not isinstance(strategy, tf.distribute.Strategy):
        raise TrainingError(
            f"strategy takes a tf.distribute.Strategy; {strategy!r} arrived. By name it is made"
            " with create_strategy(name)."
        )
    if strategy is None:
        has_scope = tf.distribute.has_strategy()
        strategy = tf.distribute.get_strategy() if has_scope else create_strategy()
    builder = None if isinstance(model_or_builder, keras.Model) else model_or_builder
    with variables_made_together():
        return DistributedModel(adopt(model_or_builder, strategy), strategy, builder)
