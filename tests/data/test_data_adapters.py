"""Each attribute of Keras that `data/` uses is there.

When a release of Keras moves one, the test that fails names it and says what it was for.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import keras
import numpy as np

from tfdist_ext.data import _keras_private


class OneBatch(keras.utils.PyDataset):
    num_batches = 1

    def __getitem__(self, index: int) -> Any:
        return np.ones((2, 2))


def test_attributes_of_objects() -> None:
    """Each attribute that the module looks up by `NAMES.of` is on the object that it is for."""
    arrays = _keras_private.get_data_adapter(np.ones((4, 2)), np.ones(4), batch_size=2)
    holders: dict[str, Any] = {
        "_inputs": arrays,
        "_num_samples": arrays,
        "_batch_size": arrays,
        "_get_iterator": _keras_private.get_data_adapter(OneBatch()),
    }
    source = Path(_keras_private.__file__).read_text()
    assert {*re.findall(r'NAMES\.of\([\w.]+, "(\w+)"', source)} == {*holders}
    for name, holder in holders.items():
        assert hasattr(holder, name), f"Keras {keras.__version__} moved {name} of {holder}"
