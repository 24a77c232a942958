"""Workers that differ in one thing: each is told which, on which worker, and both values."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from task_programs import results_of

sys.path.insert(0, str(Path(__file__).parents[2] / "programs"))

ERRORS = {
    "activation": ["activation of layer 2 ('dense')", "is relu on worker 0 and tanh on worker 1"],
    "given": ["activation of layer 2 ('dense')", "is relu on worker 0 and tanh on worker 1"],
    "optimizer": ["momentum of optimizer", "is 0.0 on worker 0 and 0.5 on worker 1"],
    "deferred size": ["units of layer 1 ('dense') must be", "is 8 on worker 0 and 9 on worker 1"],
    "vocabulary": ["vocabulary of layer 2 ('string_lookup')", "is ['[UNK]', 'a', 'c', 'b']"],
    "batches": ["batch size of x must be the same on all workers, but is 8 on worker 0 and 9 on"],
    "steps": ["batches in the data must be the same on all workers, but is 6 on worker 0 and 5 on"],
    "validation": ["validation_data must be", "is none on worker 0 and given on worker 1"],
    "integers": ["x must be the same on all workers, but is int32 [48, 4] ", "from_dataset_fn"],
    "unseeded shuffle": ["y must be the same on all workers, but is int32", "a seed for shuffle()"],
    "jit_compile": [
        "jit_compile of compile() must be",
        "is False on worker 0 and True on worker 1",
    ],
    "bucket_bytes": ["bucket_bytes of the strategy must be", "is 1000 on worker 0 and 2000 on"],
    "weights": ["/kernel must be the same on all workers, but its sum is", "with a seed"],
    "learning rate": [
        "learning_rate must be the same on all workers, but its sum is 0.1 on worker 0 and 1.1 on"
        " worker 1. "
    ],
    "recompiled": ["loss must be the same on all workers, but is mse on worker 0 and mae on"],
}
WARNINGS = ["augmentation", "noise", "one row of x"]
NOTHING = ["harmless", "read by the chief"]


@pytest.fixture(scope="module")
def workers() -> list[dict[str, Any]]:
    return results_of("different_workers.py", cluster=2, timeout=300)


@pytest.mark.parametrize("what", ERRORS)
def test_a_difference_is_an_error_on_every_worker(workers: list[dict[str, Any]], what: str) -> None:
    for worker in workers:
        assert worker[what].startswith("error: ")
        for words in ERRORS[what]:
            assert words in worker[what]


def test_a_given_model_that_differs_does_not_move(workers: list[dict[str, Any]]) -> None:
    assert [worker["has_moved"] for worker in workers] == [False, False]


@pytest.mark.parametrize("what", WARNINGS)
def test_other_floats_are_a_warning_on_the_chief(workers: list[dict[str, Any]], what: str) -> None:
    chief, other = (worker[what] for worker in workers)
    assert chief.startswith("warning: x must be the same on all workers, but is float32 ")
    assert "only floating-point values differ" in chief
    assert other == "nothing"


@pytest.mark.parametrize("what", NOTHING)
def test_what_may_differ_is_no_difference(workers: list[dict[str, Any]], what: str) -> None:
    assert [worker[what] for worker in workers] == ["nothing", "nothing"]


def test_new_variables_start_from_the_values_of_the_chief(workers: list[dict[str, Any]]) -> None:
    first, other = (worker["first_values"] for worker in workers)
    assert first == other
    assert (first["shift"], first["rate"]) == ([10.0], pytest.approx(0.1))


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_a_seeded_shuffle_has_the_order_of_one_process(workers: list[dict[str, Any]]) -> None:
    import shuffled_training

    one = shuffled_training.losses(None)  # Keras's own fit
    for worker in workers:
        assert worker["order"] == pytest.approx(one, rel=1e-5)
