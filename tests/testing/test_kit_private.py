"""TensorFlow still ships its contract tests: when a release moves one, this names it."""

from __future__ import annotations

import re
from pathlib import Path
from unittest import SkipTest

import pytest
import tensorflow as tf
from tensorflow.python.distribute import strategy_test_lib as lib

from tfdist_ext.testing.conformance import _tf_private, tensorflow_checks

USED = re.findall(r'contract_test\(\s*"(\w+)"', Path(tensorflow_checks.__file__).read_text())


@pytest.mark.parametrize("name", [*(f"_test_{name}" for name in USED), "_test_input_fn_iterable"])
def test_contract_tests_are_there(name: str) -> None:
    bases = (lib.TwoDeviceDistributionTestBase, lib.DistributionTestBase)
    assert any(hasattr(base, name) for base in bases), f"TensorFlow {tf.__version__} moved {name}"
    assert len(USED) == 9


def test_one_that_is_not_there_is_skipped() -> None:
    with pytest.raises(SkipTest, match="this TensorFlow has no test _test_nonsense of strategies"):
        _tf_private.contract_test("nonsense", tf.distribute.get_strategy())
