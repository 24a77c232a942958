"""Parameter servers with one worker against plain Keras: whole and partitioned variables."""

from __future__ import annotations

from typing import Any

import pytest
from task_programs import results_of

pytestmark = pytest.mark.timeout(500)
TOLERANCE = 5e-7


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(2, id="partitioned"),
        pytest.param(0, id="whole", marks=pytest.mark.long),
    ],
)
def result(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    file = str(tmp_path_factory.mktemp("exact") / "model.keras")
    words = (str(request.param), file)
    (found,) = results_of("train_parameter_server_exact.py", *words, timeout=450)
    assert found["pieces"] == max(1, request.param)
    assert len(found["optimizers"]) == 8
    return found


def test_training_is_plain_keras(result: dict[str, Any]) -> None:
    for name, found in result["optimizers"].items():
        assert max(found["weights"], found["slots"], found["history"]) < TOLERANCE, name
        assert found["steps"] == {"accumulation": 4, "skipped steps": 4}.get(name, 8), name


@pytest.mark.parametrize("case", ["own step", "weight assigned in call"])
def test_own_steps_and_weights_of_layers(result: dict[str, Any], case: str) -> None:
    found = result[case]
    assert found["names"][0] == found["names"][1]
    assert max(found["weights"], found["slots"], found["history"]) < TOLERANCE


def test_saved_model_is_plain_keras(result: dict[str, Any]) -> None:
    assert result["saved"] < TOLERANCE
    assert result["evaluate"] < TOLERANCE


def test_the_only_worker_reads_its_data(result: dict[str, Any]) -> None:
    assert result["read by the worker"] < TOLERANCE


def test_steps_before_an_error_count(result: dict[str, Any]) -> None:
    assert "damaged" in result["error"]
    assert result["steps before the error"] == 3
    assert result["traced once"]  # jit_compile=True is turned off


def test_rows_are_gathered_on_the_servers(result: dict[str, Any]) -> None:
    assert result["gathers"] >= result["pieces"]
