"""The share of a machine's cores of each of several processes."""

from __future__ import annotations

import pytest

from tfdist_ext.strategies.cores import cores_of_each


@pytest.mark.parametrize(
    ("processes", "cores", "usable", "share"),
    [
        (1, 8, 8, None),
        (2, 8, 8, 4),
        (3, 8, 8, 2),
        (16, 8, 8, 1),
        (2, 8, 4, None),  # bound to its share, by Slurm
    ],
)
def test_processes_of_a_machine_share_its_cores(
    processes: int, cores: int, usable: int, share: int | None
) -> None:
    assert cores_of_each(processes, cores=cores, usable=usable) == share
