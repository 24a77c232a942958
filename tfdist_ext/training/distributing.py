"""distribute: a Keras model, or what builds it, and a strategy."""

from __future__ import annotations

from collections.abc import Callable

import keras
import tensorflow as tf

from tfdist_ext.errors import TrainingError
from tfdist_ext.strategies import create_strategy
from tfdist_ext.strategies.explanation import evaluates, is_apart
from tfdist_ext.strategies.spanning import check_spans_cluster
from tfdist_ext.training.adopt import adopt
from tfdist_ext.training.model import DistributedModel
from tfdist_ext.training.peers import peers_of
from tfdist_ext.training.same_model import variables_made_together

__all__ = ["distribute"]


def distribute(
    model_or_builder: keras.Model | Callable[[], keras.Model],
    strategy: tf.distribute.Strategy | None = None,
    *,
    alone: bool = False,
) -> DistributedModel:
    """Put a Keras model on a strategy.

    Args:
        model_or_builder: a function without arguments that returns a model (compiled or not),
            or an existing model, trained or not. Of an existing model a copy is made, with its
            weights, compile settings and optimizer state; the original stays as it is.
        strategy: any `tf.distribute.Strategy`; by default the one whose scope is open, else
            `create_strategy()`; with `alone` that is one of this machine.
        alone: let each task of the cluster that the environment describes train by itself, where
            the strategy has replicas on this machine only.

    Raises:
        TrainingError: not a model, one that cannot be copied from its config, or a strategy
            that is none.
        StrategyError: a strategy of one machine in a cluster of several tasks.
    """
    if strategy is not None and not isinstance(strategy, tf.distribute.Strategy):
        raise TrainingError(
            f"strategy takes a tf.distribute.Strategy; {strategy!r} arrived. By name it is made"
            " with create_strategy(name)."
        )
    if strategy is None:
        if tf.distribute.has_strategy():
            strategy = tf.distribute.get_strategy()
        else:
            # None, and not False, which would go over flags and the file.
            strategy = create_strategy(alone=alone or None)
    if not (alone or is_apart(strategy) or evaluates(strategy)):
        check_spans_cluster(strategy, type(strategy).__name__)
    builder = None if isinstance(model_or_builder, keras.Model) else model_or_builder
    peers = peers_of(strategy)
    with peers.call("distribute"):
        # Their first values are the chief's.
        with peers.meeting("making the model"), variables_made_together():
            model = adopt(model_or_builder, strategy)
        return DistributedModel(model, strategy, builder)
