"""The batches of a PyDataset, shuffled alike on every task."""

from __future__ import annotations

import random
from typing import Any

import keras
import numpy as np
import pytest
from training_cases import CLASSIFIER, X, Y, distributed_fit

from tfdist_ext.training.inputs import read

BATCHES = 12


class Numbered(keras.utils.PyDataset):
    """Batch i holds two rows with the number i."""

    num_batches = BATCHES

    def __getitem__(self, index: int) -> Any:
        return np.full((2, 1), index, "float32"), np.array([index % 2, 1], "float32")


def numbers_of(batch: Any) -> int:
    return int(batch[0][2][0][0, 0])


def passes_over(source: Numbered, random_seed: int, passes: int = 3, **options: Any) -> Any:
    random.seed(random_seed)  # as on tasks that have drawn other numbers before
    batches = read(source, **{"shuffle": True, "seed": lambda: 7, **options})
    data = batches.on_host(0, 1, 1)
    return [[numbers_of(batch) for batch in data] for _ in range(passes)]


@pytest.mark.parametrize(
    "options", [{}, {"workers": 2, "max_queue_size": 3}], ids=["here", "short queue"]
)
def test_every_task_has_the_same_new_order_in_each_pass(options: dict[str, Any]) -> None:
    one, other = (passes_over(Numbered(**options), seed) for seed in (1, 2))
    assert one == other
    assert all(sorted(order) == list(range(BATCHES)) for order in one)
    assert one[0] != one[1] != one[2]
    assert one != passes_over(Numbered(**options), 1, seed=lambda: 8)


class FourBatches(keras.utils.PyDataset):
    num_batches = 4

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.asked: list[int] = []
        self.noted: list[str] = []

    def __getitem__(self, index: int) -> Any:
        self.asked.append(index)
        return X[index * 16 : index * 16 + 16], Y[index * 16 : index * 16 + 16]

    def on_epoch_begin(self) -> None:
        self.noted.append("begin")

    def on_epoch_end(self) -> None:
        self.noted.append("end")


@pytest.mark.filterwarnings("ignore:the data ended after")
def test_an_epoch_may_end_within_a_pass() -> None:
    """Epochs of 3 of the 4 batches: 3, then the one that is left, then 3 of the next pass."""
    data = FourBatches(workers=2)
    ours, _ = distributed_fit(CLASSIFIER, data, shuffle=True, epochs=3, steps_per_epoch=3)
    assert int(ours.keras_model.optimizer.iterations.numpy()) == 7
    assert data.noted == ["end", *["begin", "end"] * 3]
