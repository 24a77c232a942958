"""Loops of the user's own over variables in shards on parameter servers."""

from __future__ import annotations

from typing import Any

import pytest
from task_programs import results_of

TOLERANCE = 5e-7


@pytest.fixture(scope="module")
def result() -> Any:
    (found,) = results_of("own_loop_on_servers.py", timeout=240)
    return found


def test_a_tape_gives_the_gradient_of_a_variable_in_shards(result: Any) -> None:
    found = result["gradients"]
    assert len(found) == 9
    for name, (difference, rows) in found.items():
        assert difference <= TOLERANCE, name
        # Of a table: of its rows alone. TensorFlow's own loops densify it, on one device too.
        if name not in ("while_loop", "of a gradient", "unconnected"):
            assert rows[0], name
        assert not any(rows[1:]), name


def test_an_optimizer_updates_each_shard_as_one_device_does(result: Any) -> None:
    """Weights and the optimizer's own variables, which are in shards as well."""
    assert len(result["trained"]) == 4
    for name, difference in result["trained"].items():
        assert difference <= TOLERANCE, name
    servers = [f"/job:ps/replica:0/task:{server}" for server in range(3)]
    assert result["updates"] == servers
    assert result["slots"] == 4  # two of Adam for each of two variables
