"""Training by real tasks: a coordinator, two workers and two parameter servers."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from real_tasks import Tasks, tasks

pytestmark = pytest.mark.timeout(400)  # the tasks do much for many tests
LABELS = (303 - 1) / 2  # the mean of 0, 1, ..., 302


def result_of(cluster: Tasks, seconds: float = 270.0) -> dict[str, Any]:
    return json.loads(cluster.wait_for("chief:0", r"RESULT (.*)\n", seconds)[1])


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("parameter_server")
    with tasks("train_parameter_server.py", "data", folder=folder, workers=2, ps=2) as cluster:
        cluster.start("chief:0", "worker:0", "worker:1", "ps:0", "ps:1")
        return result_of(cluster)


def test_every_example_counts_once_and_every_step(result: dict[str, Any]) -> None:
    arrays = result["arrays"]
    assert (arrays["steps"], arrays["applied"]) == (62, 62)
    assert arrays["labels"] == pytest.approx([LABELS] * 2, rel=1e-6)
    assert arrays["val_labels"] == pytest.approx([24.5] * 2, rel=1e-6)
    unknown = result["unknown length"]
    assert (unknown["steps"], unknown["applied"]) == (62, 62)
    assert unknown["labels"] == pytest.approx([LABELS] * 2, rel=1e-6)
    endless = result["endless"]
    assert (endless["steps"], endless["applied"]) == (30, 30)
    assert endless["labels"] == pytest.approx([74.5, 224.5], rel=1e-6)


def test_a_dataset_function_gives_each_worker_its_shard(result: dict[str, Any]) -> None:
    by_worker = result["read by workers"]
    assert (by_worker["steps"], by_worker["applied"]) == (2 * (16 + 16), 2 * (16 + 16))
    assert by_worker["labels"] == pytest.approx([LABELS] * 2, rel=1e-6)
    assert by_worker["val_labels"] == pytest.approx([LABELS] * 2, rel=1e-6)
    endless = result["endless, read by workers"]
    assert (endless["steps"], endless["applied"]) == (50, 50)
    assert "predict" not in result, "rows that workers read have no order"


def test_what_workers_cannot_read_the_coordinator_hands_out(result: dict[str, Any]) -> None:
    for kind in ("read by the coordinator", "made outside"):
        here = result[kind]
        assert (here["steps"], here["applied"]) == (31, 31)
        assert here["labels"] == pytest.approx([LABELS], rel=1e-6)
    assert result["place"] == [1, 0]
    assert "created outside the function" in result["why here"]


def test_ordered_data_is_gone_on_with_in_the_middle_of_an_epoch(result: dict[str, Any]) -> None:
    found = result["sharded"]
    assert (found["steps"], found["applied"]) == (62, 62)
    assert found["labels"] == pytest.approx([LABELS] * 2, rel=1e-6)  # the second was broken off
    assert found["evaluate"] == pytest.approx(LABELS, rel=1e-6)
    assert found["place"] == [2, 0]


def test_evaluate_and_predict(result: dict[str, Any]) -> None:
    assert result["evaluate"] == pytest.approx(LABELS, rel=1e-6)
    assert result["predict in order"]


def test_schedules_see_the_true_step(result: dict[str, Any]) -> None:
    assert result["scheduled steps"] == 31
    assert result["applied before the rate is 0"] == 15  # steps 0 to 14
    assert result["warned of run_eagerly"]


def test_callbacks_see_each_step(result: dict[str, Any]) -> None:
    expected = [(batch, batch + 1, 10 * batch / 2 + 4.5) for batch in range(5)]
    assert [tuple(seen) for seen in result["watched"]] == [
        (batch, step, pytest.approx(labels, rel=1e-6)) for batch, step, labels in expected
    ]


def test_logs_of_metrics_under_other_names(result: dict[str, Any]) -> None:
    arrays, evaluated = result["renamed"]
    expected = {"shown": 151.0, "own": 1.0}
    assert evaluated == pytest.approx(expected)
    for name, value in expected.items():
        assert arrays[name] == pytest.approx([value] * 2)


def test_a_callback_reads_and_sets_the_learning_rate(result: dict[str, Any]) -> None:
    assert result["rates"] == [[0.5, 31], [0.25, 62]]


def test_ctrl_c_and_errors_leave_a_cluster_that_works(result: dict[str, Any]) -> None:
    assert 1 <= result["seconds until interrupted"] < 12
    assert result["labels after"] == pytest.approx(49.5, rel=1e-6)
    assert "= 77 is not in [0, 5)" in result["bad ids"]


def test_workers_use_tables_and_variables_of_the_scope(result: dict[str, Any]) -> None:
    """In fit and in its validation; what cannot be sent to them is read by the coordinator."""
    expected = {"adapted, variable": 84 + 48, "table, Python": 36}
    for name, sum_of_ids in expected.items():
        found = result["lookups"][name]
        assert found["sums"] == [sum_of_ids] * 2, name
        assert all("calls Python" in said for said in found["here"])
        assert bool(found["here"]) == (name == "table, Python")


def test_a_killed_worker_costs_no_example(tmp_path: Path) -> None:
    """With data that travels with the calls, and with data of a worker that comes back in time."""
    with tasks("train_parameter_server.py", "loss", folder=tmp_path, workers=2, ps=1) as cluster:
        cluster.start("chief:0", "worker:0", "worker:1", "ps:0")
        cluster.wait_for("chief:0", "EPOCH 0")
        cluster.signal("worker:0", signal.SIGKILL)
        cluster.wait_for("chief:0", "EPOCH 2")  # the other one goes on alone
        cluster.start("worker:0")
        cluster.wait_for("chief:0", "OWN DATA 0")
        time.sleep(0.3)  # it is somewhere in its data
        cluster.signal("worker:0", signal.SIGKILL)
        cluster.wait_for("chief:0", "no answer from worker 0 for 1 s")
        cluster.wait_for("chief:0", "OWN DATA 1")
        cluster.start("worker:0")
        time.sleep(8.0)  # TensorFlow may hang if both workers are away at once
        cluster.signal("worker:1", signal.SIGKILL)
        cluster.start("worker:1")
        result = result_of(cluster)
    mean = (32 * 300 - 1) / 2
    assert result["steps"] == 900
    assert result["labels"] == pytest.approx([mean] * 3, rel=1e-6)
    assert result["evaluate"] == pytest.approx(mean, rel=1e-6)
    # The worker may have applied some steps of the one call that was made again.
    assert 900 <= result["applied"] <= 1808
    own, mean = result["own data"], (32 * 300 - 1) / 2
    assert 300 <= own["steps"] < 600  # the rest of a shard is left out of the first epoch
    assert own["labels"][1] == pytest.approx(mean, rel=1e-6)
    assert own["evaluate"] == pytest.approx(mean, rel=1e-6)
    assert 300 <= own["applied"] <= 1216
