"""Where epochs begin and end in the data: as in Keras's own fit."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from training_cases import mirrored

sys.path.insert(0, str(Path(__file__).parents[1] / "programs"))


@pytest.mark.filterwarnings("ignore:Your input ran out of data", "ignore:the data ended after")
def test_shuffled_datasets_have_the_order_of_keras() -> None:
    import shuffled_training

    kinds = ["shuffled, batched", "infinite"]
    ours, expected = (shuffled_training.losses(s, kinds) for s in (mirrored(), None))
    assert list(ours) == list(expected)
    for kind, losses in ours.items():
        assert losses == pytest.approx(expected[kind], rel=1e-5), kind
