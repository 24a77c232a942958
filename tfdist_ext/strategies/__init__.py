"""Strategies by name: chosen from what is there, made by TensorFlow, explained in words."""

from tfdist_ext.strategies.cluster_tasks import run
from tfdist_ext.strategies.explanation import Explanation, explain
from tfdist_ext.strategies.factory import create_strategy
from tfdist_ext.strategies.placed import PlacedStrategy
from tfdist_ext.strategies.reductions import Reduced
from tfdist_ext.strategies.registry import available_strategies, register_strategy
from tfdist_ext.strategies.template import StrategyTemplate

__all__ = [
    "Explanation",
    "PlacedStrategy",
    "Reduced",
    "StrategyTemplate",
    "available_strategies",
    "create_strategy",
    "explain",
    "register_strategy",
    "run",
]
