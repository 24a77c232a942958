"""Loops of the user's own over variables in shards on parameter servers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from warm_programs import run_program

PROGRAM = Path(__file__).parents[1] / "programs" / "own_loop_on_servers.py"
TOLERANCE = 5e-7


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Any:
    command = [sys.executable, str(PROGRAM)]
    run = run_program(command, tmp_path_factory.mktemp("own_loop"), timeout=240)
    assert "RESULT " in run.stdout, run.stderr[-3000:]
    return json.loads(run.stdout.rsplit("RESULT ", 1)[1].splitlines()[0])


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
