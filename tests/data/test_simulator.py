"""The simulator's arithmetic against examples that are listed, one by one, where they are few."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdist_ext.data import DataError, Order, Shard, simulator
from tfdist_ext.data.simulator import Plan, report, simulate

SCRIPT = Path(__file__).parents[2] / "scripts" / "shard_simulator"
LARGE: dict[str, Any] = {"examples": 10**9, "files": 10_000, "workers": 4096}


def listed(order: Order, steps: range, workers: int) -> list[list[int]]:
    """What each worker reads, as the data itself would say: from the order without a seed."""
    return [
        [int(i) for step in steps for i in order.indices(step, Shard(worker, workers)).numpy()]
        for worker in range(workers)
    ]


@settings(deadline=None, max_examples=25)
@given(st.data())
def test_against_the_order_itself(four_cpus: None, data: st.DataObject) -> None:
    examples = data.draw(st.integers(1, 60))
    workers = data.draw(st.integers(2, 6))
    plan = Plan(
        examples=examples,
        files=data.draw(st.integers(1, 9)),
        workers=workers,
        global_batch_size=data.draw(st.integers(max(1, examples // 8), examples)),
        kill=data.draw(st.integers(1, workers - 1)),
        checkpoint_steps=data.draw(st.integers(1, 4)),
    )
    order, found = Order(examples, plan.batch), simulate(plan)
    assert plan.steps == order.steps
    whole = listed(order, range(order.steps), workers)
    assert found.whole.examples == tuple(map(len, whole))
    assert found.before is not None
    assert found.again is not None
    assert found.after is not None
    before = listed(order, range(plan.saved_at), workers)
    after = listed(order, range(plan.saved_at, order.steps), plan.going_on)
    assert found.before.examples == tuple(map(len, before))
    assert found.after.examples == tuple(map(len, after))
    again = listed(order, range(plan.saved_at, plan.killed_at), plan.going_on)
    assert found.again.examples == tuple(map(len, again))
    read = Counter(i for worker in [*before, *after] for i in worker)
    assert read == Counter(range(examples))
    assert (found.lost, found.doubled) == (0, 0)


def test_a_large_cluster() -> None:
    found = simulate(Plan(**LARGE, kill=3, resume_workers=4093, example_bytes=984))
    assert sum(found.whole.examples) == 10**9
    assert (min(found.whole.examples), max(found.whole.examples)) == (244_140, 244_141)
    assert found.before is not None
    assert found.again is not None
    assert found.after is not None
    assert sum(found.before.examples) + sum(found.after.examples) == 10**9
    assert sum(found.again.examples) == 907 * 262_144
    assert len(found.after.examples) == 4093
    assert found.by_files is not None
    assert (min(found.by_files), max(found.by_files)) == (2 * 10**8, 3 * 10**8)
    assert (found.lost, found.doubled) == (0, 0)


@pytest.mark.parametrize(
    ("parts", "size", "gaps"),
    [
        pytest.param([(0, 3), (3, 6)], 6, (0, 0), id="right"),
        pytest.param([(3, 6), (0, 3), (2, 2)], 6, (0, 0), id="in another order, one empty"),
        pytest.param([(0, 2), (3, 6)], 6, (1, 0), id="one in the middle is lost"),
        pytest.param([(1, 3), (3, 5)], 6, (2, 0), id="both ends are lost"),
        pytest.param([(0, 4), (3, 6)], 6, (0, 1), id="one is doubled"),
        pytest.param([(0, 6), (0, 6), (2, 3)], 6, (0, 7), id="many are doubled"),
        pytest.param([(0, 7)], 6, (0, 1), id="one that belongs to the next"),
        pytest.param([], 6, (6, 0), id="all are lost"),
    ],
)
def test_what_is_lost_or_doubled_is_seen(
    parts: list[tuple[int, int]], size: int, gaps: tuple[int, int]
) -> None:
    assert simulator._gaps(parts, size) == gaps


def test_a_wrong_cut_is_reported(monkeypatch: Any) -> None:
    """As if the parts were rounded down, which loses what does not divide."""
    monkeypatch.setattr(simulator, "bounds", lambda n, i, k: (n // k * i, n // k * (i + 1)))
    plan = Plan(examples=103, files=2, workers=4, global_batch_size=10)
    found = simulate(plan)
    assert (found.lost, found.doubled) == (10 * 2 + 3, 0)
    assert "80 of 103 examples; lost: 23, doubled: 0" in report(plan)


def test_the_report() -> None:
    text = report(Plan(**LARGE, kill=3, resume_workers=4093))
    assert "4,096 workers, 3,815 steps of 262,144 examples" in text
    assert "after step 1,907; the last checkpoint is of step 1,000; 4,093 workers continue" in text
    assert "read again: 907 steps, 237,764,608 examples, 23.78 TB: 23.776% of the epoch" in text
    assert "largest over mean 1.2288" in text
    assert text.endswith("of 1,000,000,000 examples; lost: 0, doubled: 0")


def test_without_an_accident_and_with_few_files() -> None:
    text = report(Plan(examples=1000, files=3, workers=7, global_batch_size=10))
    assert "killed" not in text
    assert "whole files: not possible, 3 for 7 workers" in text
    assert "1.4000" in text  # 10 examples a step: three of seven workers read two


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"examples": 0}, "examples must be an integer of at least 1"),
        ({"workers": -1}, "workers must be an integer of at least 1"),
        ({"kill": 4097}, "kill must be an integer from 0 to 4096"),
        ({"kill": 4096}, "kill must be less than the 4096 workers, got 4096"),
        ({"kill_step": 10**6}, "kill_step must be an integer from -1 to 3815"),
        (
            {"global_batch_size": 10**10},
            "must be at most the 1000000000 examples, got 10000000000",
        ),
        ({"checkpoint_steps": 0}, "checkpoint_steps must be an integer of at least 1"),
    ],
)
def test_plans_that_cannot_be(change: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        Plan(**{**LARGE, **change})


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *args], capture_output=True, text=True, timeout=60
    )


def test_the_script() -> None:
    sizes = ["--examples=1e9", "--files=10000", "--workers", "4096"]
    result = run(*sizes, "--kill", "3", "--resume-workers", "4093")
    assert result.returncode == 0, result.stderr
    assert result.stdout == report(Plan(**LARGE, kill=3, resume_workers=4093)) + "\n"


@pytest.mark.parametrize(
    ("examples", "message"),
    [
        ("nan", "'nan' is no whole number"),
        ("1.5", "'1.5' is no whole number"),
        ("many", "'many' is no whole number"),
        ("-3", "shard_simulator: examples must be an integer of at least 1, got -3"),
    ],
)
def test_numbers_that_the_script_does_not_take(examples: str, message: str) -> None:
    result = run(f"--examples={examples}", "--files=1", "--workers=1")
    assert result.returncode != 0
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_it_needs_no_tensorflow() -> None:
    code = "import sys, tfdist_ext.data.simulator; print({'tensorflow', 'numpy'} & {*sys.modules})"
    output = subprocess.check_output([sys.executable, "-c", code], text=True, timeout=60)
    assert output.strip() == "set()"
