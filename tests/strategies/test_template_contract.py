"""The whole contract on strategies that change the template's hooks.

The template as it stands: `tests/testing`.
"""

from __future__ import annotations

import tensorflow as tf
from template_cases import Mixed, OwnedAndPairwise, Shared

from tfdist_ext.strategies import PlacedStrategy
from tfdist_ext.testing import StrategyConformance


class TestMixed(StrategyConformance):
    def strategy(self) -> tf.distribute.Strategy:
        return Mixed(3)


class TestShared(StrategyConformance):
    def strategy(self) -> tf.distribute.Strategy:
        return Shared(2)


class TestOwnedAndPairwise(StrategyConformance):
    def strategy(self) -> tf.distribute.Strategy:
        return OwnedAndPairwise(2)


class TestInPieces(StrategyConformance):
    def strategy(self) -> tf.distribute.Strategy:
        return PlacedStrategy(3, {".*/(kernel|embeddings)": "sharded(2)"})
