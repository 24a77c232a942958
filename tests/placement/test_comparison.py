"""Bytes on each device under each strategy, from numbers worked out by hand."""

from __future__ import annotations

import pytest
from placement_models import bert_large

from tfdist_ext.placement import Footprint, PlacementError, VariableSpec, compare

SPECS = [
    VariableSpec("kernel", (100, 10), slots=2, slot_bytes=3),  # 4000 bytes
    VariableSpec("moving_mean", (100,), trainable=False),  # 400 bytes
]


def test_every_strategy() -> None:
    assert compare(SPECS, devices=4, ps=2).rows == (
        Footprint("mirrored", "each device", 4400, 4000, 8003),
        Footprint("central_storage", "host", 4400, 0, 8003),
        Footprint("central_storage", "each device", 0, 4000, 0),
        # The slots of one variable have one owner, however many devices there are.
        Footprint("placed", "fullest device", 4400, 4000, 8003),
        # 50 rows of the kernel, or 50 rows and the 3 bytes; moving_mean in two halves.
        Footprint("parameter_server", "fullest ps", 2200, 0, 4003),
        Footprint("parameter_server", "each worker", 0, 4000, 0),
    )


def test_the_table() -> None:
    """335,141,888 parameters of 4 bytes are 1.25 GiB, Adam's slots twice that."""
    lines = str(compare(bert_large(), 8, 4)).splitlines()
    assert lines[0].split() == ["strategy", "on", "weights", "gradients", "slots", "total"]
    assert [" ".join(line.split()) for line in lines[1:]] == [
        "mirrored each device 1.25 GiB 1.25 GiB 2.50 GiB 4.99 GiB",
        "central_storage host 1.25 GiB 0 B 2.50 GiB 3.75 GiB",
        "central_storage each device 0 B 1.25 GiB 0 B 1.25 GiB",
        # Of 2557 MiB slots an eighth is 319.6: ten kernels of 16 MiB with two slots are 320.
        "placed fullest device 1.25 GiB 1.25 GiB 320.00 MiB 2.81 GiB",
        # Of 3835 MiB a quarter is 958.8: twenty such kernels with their slots are 960.
        "parameter_server fullest ps 320.00 MiB 0 B 640.00 MiB 960.00 MiB",
        "parameter_server each worker 0 B 1.25 GiB 0 B 1.25 GiB",
    ]
    assert len({line.rindex(" ") for line in lines[1:]}) == 1  # the units stand in one column


def test_the_gradient_of_an_embedding_has_a_row_for_each_lookup() -> None:
    table = VariableSpec("users/embeddings", (800_000_000, 64), slots=2, embedding=True)
    frozen = VariableSpec("items/embeddings", (1000, 64), trainable=False, embedding=True)
    compared = compare([table, frozen, *SPECS], devices=8, ps=4, lookups=500)
    gradients = {row.gradients for row in compared.rows}
    assert gradients == {0, 500 * 64 * 4 + 4000}  # 190 GiB if every row had one
    text = str(compared)
    assert text.endswith("that a step looks up: 500 in each of 1 embedding (--lookups).")
    assert "--lookups" not in str(compare(SPECS, devices=8, ps=4))


def test_what_cannot_be_compared() -> None:
    with pytest.raises(PlacementError, match=r"devices must be an integer of at least 1, got 0"):
        compare(SPECS, 0, 1)
    with pytest.raises(PlacementError, match="ps must be an integer of at least 0"):
        compare(SPECS, 1, -1)
    with pytest.raises(PlacementError, match="lookups must be an integer of at least 1, got 0"):
        compare(SPECS, 1, 1, lookups=0)
