"""TensorFlow's own contract tests of strategies, which its wheel ships, on the template.

Those that need the iterators of TensorFlow 1 (make_input_fn_iterator, experimental_run) do not
apply to a public tf.distribute.Strategy.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import tensorflow as tf
from template_cases import Mixed, Owned, Pairwise
from tensorflow.python.distribute import strategy_test_lib

from tfdist_ext.strategies import StrategyTemplate


# Its test cases still use what TensorFlow and unittest call deprecated.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
class TestContract(
    strategy_test_lib.DistributionTestBase, strategy_test_lib.TwoDeviceDistributionTestBase
):
    test_session = None  # TensorFlow's own, which pytest would take for a test

    def each(self) -> Iterator[Any]:
        for cls in (StrategyTemplate, Mixed, Owned, Pairwise):
            yield cls(2)

    def test_minimize_loss_eager(self) -> None:
        for strategy in self.each():
            self._test_minimize_loss_eager(strategy)

    def test_minimize_loss_graph(self) -> None:
        # A session of TensorFlow 1 knows one CPU.
        self._test_minimize_loss_graph(StrategyTemplate(1))

    def test_replica_id(self) -> None:
        self._test_replica_id(StrategyTemplate(4))

    def test_call_and_merge_exceptions(self) -> None:
        for strategy in self.each():
            self._test_call_and_merge_exceptions(strategy)

    def test_summary_for_replica_zero_only(self) -> None:
        self._test_summary_for_replica_zero_only(StrategyTemplate(2))

    def test_trainable_variable(self) -> None:
        for strategy in self.each():
            self._test_trainable_variable(strategy)

    def test_global_step_update(self) -> None:
        self._test_global_step_update(StrategyTemplate(2))

    def test_run(self) -> None:
        for strategy in self.each():
            self._test_run(strategy)
            self._test_run(strategy, run_in_function=True)

    def test_input_fn_iterable(self) -> None:
        function = self._input_fn_to_test_input_context(
            lambda: tf.data.Dataset.range(10),
            expected_num_replicas_in_sync=2,
            expected_num_input_pipelines=1,
            expected_input_pipeline_id=None,
        )
        expected = [[i, i + 1] for i in range(0, 10, 2)]
        self._test_input_fn_iterable(StrategyTemplate(2), function, expected)
