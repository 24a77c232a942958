"""Gradients that travel in 16 bits: their sums, and what rounding changes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from task_programs import results_of

import tfdist_ext as tfd

STRATEGIES = {
    "2 workers": (2, {"gradient_dtype": "bfloat16"}),
    "3 workers": (3, {"gradient_dtype": "float16"}),
    "shared optimizer": (2, {"gradient_dtype": "bfloat16", "shard_optimizer": True}),
}


@pytest.fixture(scope="module", params=list(STRATEGIES))
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(type of the gradients, results of the workers)."""
    count, options = STRATEGIES[request.param]
    folder = str(tmp_path_factory.mktemp("narrow"))
    program = "narrow_gradients.py", json.dumps(options), folder
    return options["gradient_dtype"], results_of(*program, cluster=count, timeout=200)


@pytest.mark.timeout(300)
def test_gradients_of_few_digits_give_the_weights_of_one_device(ran: Any) -> None:
    """Dense gradients in several buckets, and slices of a table with a row that occurs twice."""
    for worker in ran[1]:
        assert worker["exact"] == [0.0, 0.0]


def test_other_gradients_are_rounded(ran: Any) -> None:
    dtype, workers = ran
    bound = {"bfloat16": 4e-3, "float16": 4e-4}[dtype]
    for worker in workers:
        for name, differences in worker["optimizers"].items():
            assert bound / 1000 < max(differences) < bound, name


def test_all_workers_have_the_same_weights(ran: Any) -> None:
    _, (chief, *others) = ran
    for worker in others:
        assert worker["weights"] == chief["weights"]


def test_explain_and_verify_name_the_type(ran: Any) -> None:
    dtype, workers = ran
    for worker in workers:
        assert f"gradients    travel as {dtype} (gradient_dtype)" in worker["explain"]
        assert f"Gradients travel as {dtype} (gradient_dtype)" in worker["verified"]
        assert "EQUAL: the model trains as it does on one device." in worker["verified"]


def test_resumed_training_has_the_weights_of_one_that_did_not_stop(ran: Any) -> None:
    for worker in ran[1]:
        assert max(worker["resumed"]) == 0.0


@pytest.mark.parametrize("dtype", ["float8", "int8", 16])
def test_other_types_are_refused(dtype: Any) -> None:
    with pytest.raises(tfd.StrategyError, match="must be 'bfloat16' or 'float16'"):
        tfd.create_strategy("multi_worker_mirrored", gradient_dtype=dtype)
