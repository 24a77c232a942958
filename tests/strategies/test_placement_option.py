"""create_strategy("parameter_server", placement=...): what cannot be right is said at once.

No server of these clusters exists: an error that came later would be a wait for them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tfdist_ext as tfd
from tfdist_ext.placement import VariableSpec, plan

SPECS = [VariableSpec("users/embeddings", (100, 8)), VariableSpec("head/kernel", (8, 1))]


def create(ps: int = 3, **options: Any) -> Any:
    jobs = {
        "chief": ("127.0.0.1:1",),
        "worker": ("127.0.0.1:2",),
        "ps": tuple(f"127.0.0.1:{3 + i}" for i in range(ps)),
    }
    cluster = tfd.ClusterConfig(jobs=jobs, task=tfd.Task("chief", 0))
    return tfd.create_strategy("parameter_server", cluster=cluster, **options)


def test_what_cannot_be_right() -> None:
    """Others: tests/placement/test_placer.py."""
    with pytest.raises(tfd.PlacementError, match=r"got one for 2\. Plan again"):
        create(placement=plan(SPECS, 2))


def test_rules_of_a_settings_file(tmp_path: Path) -> None:
    path = tmp_path / "strategy.toml"
    path.write_text('[strategy]\nname = "parameter_server"\n[strategy.placement]\n"a" = "task 9"\n')
    with pytest.raises(tfd.PlacementError, match="'a' must be from 0 to 2, got 9: there are 3 ps"):
        create(config=path)


def test_strategies_without_placement_say_so() -> None:
    with pytest.raises(tfd.StrategyError, match=r"'one_device' must be .*got placement='balanced'"):
        tfd.create_strategy("one_device", placement="balanced")
