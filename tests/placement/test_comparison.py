"""Bytes on each device under each strategy, from numbers worked out by hand."""

from __future__ import annotations

import pytest
from placement_models import bert_large

from tfdist_ext.placement import PlacementError, VariableSpec, compare


def cells(table: str) -> list[str]:
    return [" ".join(line.split()) for line in table.splitlines()]


def test_a_model_with_many_variables() -> None:
    """335,141,888 parameters of 4 bytes are 1.25 GiB, Adam's slots twice that."""
    table = compare(bert_large(), devices=8, ps=4)
    assert cells(table)[1:] == [
        "mirrored each device 1.25 GiB 2.50 GiB 3.75 GiB",
        "central_storage host 1.25 GiB 2.50 GiB 3.75 GiB",
        # Of 2557 MiB slots an eighth is 319.6: ten kernels of 16 MiB with two slots are 320.
        "placed fullest device 1.25 GiB 320.00 MiB 1.56 GiB",
        # Of 3835 MiB a quarter is 958.8: twenty such kernels with their slots are 960.
        "parameter_server fullest ps 320.00 MiB 640.00 MiB 960.00 MiB",
    ]
    assert len({line.rindex(" ") for line in table.splitlines()[1:]}) == 1  # units in one column


@pytest.mark.parametrize("numbers", [(0, 1), (1, 0)])
def test_numbers_that_are_not_positive(numbers: tuple[int, int]) -> None:
    with pytest.raises(PlacementError, match=r"must be an integer (of at least|from) 1"):
        compare([VariableSpec("a", (1,))], *numbers)
