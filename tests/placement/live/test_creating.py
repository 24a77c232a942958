"""Variables on three live parameter servers: where each is, and with which values."""

from __future__ import annotations

from typing import Any

import pytest
from task_programs import results_of


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    (task,) = results_of("placed_servers.py", timeout=200)
    return task


def test_every_variable_and_slot_is_where_the_plan_says(result: dict[str, Any]) -> None:
    assert result["live"] == result["expected"]
    slots = [path for path in result["live"] if path.endswith(("momentum", "velocity"))]
    assert len(slots) == 2 * 10


def test_rules_are_kept_on_live_servers(result: dict[str, Any]) -> None:
    live = result["live"]
    assert live["users/embeddings"] == [[0, [334]], [1, [334]], [2, [333]]]
    assert [rows for _, rows in live["items/embeddings"]] == [[167], [166]]
    assert live["dense/kernel"] == [[2, [20]]]


def test_the_plan_is_that_of_plan_placement(result: dict[str, Any]) -> None:
    assert result["learned like plan_placement"]


def test_initial_values_are_those_of_one_device_to_the_bit(result: dict[str, Any]) -> None:
    assert len(result["same initial values"]) == 2 * 12
    assert all(result["same initial values"].values()), result["same initial values"]


def test_without_placement_large_variables_are_cut_as_planned(result: dict[str, Any]) -> None:
    live = result["live by default"]
    assert live == result["expected by default"]
    assert live["users/embeddings"] == [[0, [334]], [1, [334]], [2, [333]]]
    assert len(live["items/embeddings"]) == 1
    assert "from 39.06 KiB on it is cut into a piece for each ps" in result["explained"]


def test_a_device_that_the_user_asks_for_is_honored(result: dict[str, Any]) -> None:
    assert result["asked"] == [[[1, [5]]], [[1, [4]]], [[1, [3]]]]


def test_variables_without_a_plan_go_where_the_fewest_bytes_are(result: dict[str, Any]) -> None:
    assert result["one by one"] == [0, 1, 2, 0, 1, 2]


def test_a_plan_for_another_model_or_cluster_is_refused(result: dict[str, Any]) -> None:
    other_model, other_cluster = result["refused"]
    assert "the plan does not match the variables of the model" in other_model
    assert "changed: 'users/embeddings' from float32[1001, 13] to float32[1001, 5]" in other_model
    assert "for 2 ps tasks, but the cluster has 3 ps tasks" in other_cluster
    assert result["variables of the refused"] == 0
