"""The private names of TensorFlow that the conformance kit uses, with the reason.

`strategy_test_lib` has TensorFlow's own tests of what every strategy must do. The wheel ships it,
but nothing public leads there.

`tests/testing/test_kit_private.py` fails with the name when a release moves one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any
from unittest import SkipTest

import tensorflow as tf

__all__ = ["contract_test", "dataset_contract_test"]


def contract_test(name: str, strategy: tf.distribute.Strategy, **options: Any) -> None:
    """Run the test `_test_<name>` of TensorFlow on a strategy; what it raises is raised.

    Raises:
        SkipTest: this TensorFlow does not ship it.
    """
    _in_a_case(lambda case: _method(case, f"_test_{name}")(strategy, **options))


def dataset_contract_test(strategy: tf.distribute.Strategy) -> None:
    """TensorFlow's test of `distribute_datasets_from_function`: an element for each replica."""
    count = strategy.num_replicas_in_sync
    expected = [list(range(first, first + count)) for first in range(0, 5 * count, count)]

    def test(case: Any) -> None:
        function = _method(case, "_input_fn_to_test_input_context")(
            lambda: tf.data.Dataset.range(5 * count),
            expected_num_replicas_in_sync=count,
            expected_num_input_pipelines=1,
            expected_input_pipeline_id=None,
        )
        _method(case, "_test_input_fn_iterable")(strategy, function, expected)

    _in_a_case(test)


def _in_a_case(test: Callable[[Any], None]) -> None:
    try:
        from tensorflow.python.distribute import strategy_test_lib as lib
    except ImportError as error:
        raise SkipTest(f"this TensorFlow ships no contract tests of its own: {error}") from error

    class Case(lib.TwoDeviceDistributionTestBase, lib.DistributionTestBase):
        def runTest(self) -> None:  # noqa: N802
            test(self)

    with warnings.catch_warnings():
        # They still use what TensorFlow and unittest call deprecated.
        warnings.simplefilter("ignore", DeprecationWarning)
        Case("runTest").debug()


def _method(case: Any, name: str) -> Any:
    try:
        return getattr(case, name)
    except AttributeError:
        raise SkipTest(f"this TensorFlow has no test {name} of strategies") from None
