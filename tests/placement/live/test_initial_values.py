"""Rows of an initializer's value, made without the rows before them."""

from __future__ import annotations

from collections.abc import Callable

import keras
import numpy as np
import pytest

from tfdist_ext.placement.live import initial_values
from tfdist_ext.placement.live.initial_values import rows_made_by

pytestmark = pytest.mark.usefixtures("four_cpus")


@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        (lambda: keras.initializers.RandomUniform(-0.3, 0.2, seed=5), "float64"),
        (
            lambda: keras.initializers.RandomNormal(1.0, 0.3, seed=keras.random.SeedGenerator(9)),
            "float32",
        ),
        (lambda: keras.initializers.RandomNormal(seed=4), "float64"),
        (lambda: keras.initializers.TruncatedNormal(0.5, 2.0, seed=1), "float64"),
        (lambda: keras.initializers.HeUniform(seed=2), "float32"),
        (lambda: keras.initializers.GlorotNormal(seed=3), "float32"),
    ],
    ids=["uniform 64", "normal", "normal 64", "truncated 64", "he_uniform", "glorot_normal"],
)
def test_rows_alone_are_those_of_the_whole_to_the_bit(
    make: Callable[[], keras.initializers.Initializer],
    dtype: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(initial_values, "_BLOCK", 100)  # several blocks, traced again
    initial_values._drawing.cache_clear()
    initializer, again = make(), make()
    for shape in ((1001, 13), (7, 3, 5), (64,)):
        whole = np.asarray(again(shape, dtype=dtype))
        rows = rows_made_by(initializer, shape, dtype)
        assert rows is not None
        if isinstance(initializer.seed, keras.random.SeedGenerator):
            assert (initializer.seed.state.numpy() == again.seed.state.numpy()).all()
        for start, stop in ((0, shape[0]), (1, 4), (shape[0] // 2, shape[0]), (5, 6)):
            assert np.array_equal(np.asarray(rows(start, stop)), whole[start:stop])


def test_other_initializers_are_made_whole() -> None:
    class Mine(keras.initializers.RandomNormal):
        def __call__(self, shape: tuple[int, ...], dtype: str | None = None) -> object:
            return super().__call__(shape, dtype) * 2

    for initializer in (keras.initializers.Orthogonal(), Mine(), lambda shape, dtype: None):
        assert rows_made_by(initializer, (8, 8), "float32") is None
