"""The order of examples of shuffled datasets, epoch by epoch, is that of Keras's own fit."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from training_cases import strategy_of

sys.path.insert(0, str(Path(__file__).parents[1] / "programs"))


@pytest.fixture(scope="module")
def of_keras() -> dict[str, Any]:
    import shuffled_training

    return shuffled_training.losses(None)


@pytest.mark.filterwarnings("ignore:Your input ran out of data", "ignore:the data ended after")
@pytest.mark.parametrize("feeds_on_host", [True, False])
@pytest.mark.parametrize("name", ["one_device", "mirrored"])
def test_shuffled_datasets_have_the_order_of_keras(
    of_keras: dict[str, Any], name: str, feeds_on_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shuffled_training

    from tfdist_ext.training.reduction import Reduction

    if not feeds_on_host:  # as GPUs are fed
        monkeypatch.setattr(Reduction, "feeds_on_host", property(lambda _: False, lambda *_: None))
    ours = shuffled_training.losses(strategy_of(name))
    for kind, losses in of_keras.items():
        assert ours[kind] == pytest.approx(losses, rel=1e-5), kind
