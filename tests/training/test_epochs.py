"""Where epochs begin and end in the data: as in Keras's own fit."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from training_cases import mirrored

from tfdist_ext.training.epochs import steps_of_epoch

sys.path.insert(0, str(Path(__file__).parents[1] / "programs"))


@pytest.mark.filterwarnings("ignore:Your input ran out of data", "ignore:the data ended after")
def test_shuffled_datasets_have_the_order_of_keras() -> None:
    import shuffled_training

    kinds = ["shuffled, batched", "infinite"]
    ours, expected = (shuffled_training.losses(s, kinds) for s in (mirrored(), None))
    assert list(ours) == list(expected)
    for kind, losses in ours.items():
        assert losses == pytest.approx(expected[kind], rel=1e-5), kind


ROWS = np.arange(6.0).reshape(6, 1)


def epochs_of_keras(in_pass: int, asked: int | None, epochs: int) -> list[list[int]]:
    """Keras's EpochIterator as a list: the numbers of the batches that each epoch reads."""
    result, position = [], 0
    for _ in range(epochs):
        if asked is None:
            position = 0
        read = []
        for _ in range(asked or in_pass):
            if position >= in_pass:
                break
            read.append(position)
            position += 1
        if position >= in_pass:
            position = 0
        result.append(read)
    return result


@given(st.integers(1, 12), st.one_of(st.none(), st.integers(1, 30)), st.integers(1, 9))
@settings(max_examples=300)
def test_epochs_read_the_batches_that_keras_reads(
    in_pass: int, asked: int | None, epochs: int
) -> None:
    position, read = 0, []
    for _ in range(epochs):
        steps, after = steps_of_epoch(position, in_pass, asked)
        read.append(list(range(position, position + steps)))
        position = after
    assert read == epochs_of_keras(in_pass, asked, epochs)
