"""The whole contract on strategies that change the template's hooks.

The template as it stands: `tests/testing`.
"""

from __future__ import annotations

import pytest
import tensorflow as tf
from template_cases import Mixed

from tfdist_ext.strategies import PlacedStrategy
from tfdist_ext.testing import StrategyConformance


class Less:
    """Trainings that take long, and that the first class, test_template_training and
    test_placed_training have, too; the one that is left has a table, clipping and averages."""

    test_trains_dense_with_sgd = None


@pytest.mark.long("trains_dense")
class TestMixed(StrategyConformance):
    def strategy(self) -> tf.distribute.Strategy:
        return Mixed(3)


@pytest.mark.long
class TestInPieces(Less, StrategyConformance):
    def strategy(self) -> tf.distribute.Strategy:
        return PlacedStrategy(3, {".*/(kernel|embeddings)": "sharded(2)"})
