"""Each private name of Keras that the package uses is there and does what is used of it.

When a release of Keras moves one, the test that fails names it and says what it was for.
"""

from __future__ import annotations

import keras
import pytest

from tfdist_ext.private_names import PrivateNames
from tfdist_ext.training import _keras_private, _tf_private


@pytest.mark.parametrize("names", [_keras_private.NAMES, _tf_private.NAMES])
def test_names_in_modules(names: PrivateNames) -> None:
    for name in names.uses:
        assert names(name) is not None


@pytest.mark.parametrize("replaced", _keras_private.REPLACED, ids=str)
def test_what_is_replaced_in_steps_is_there(replaced: _keras_private.Replaced) -> None:
    owner, name = replaced.place()
    assert hasattr(owner, name), f"Keras {keras.__version__} moved {replaced}"
