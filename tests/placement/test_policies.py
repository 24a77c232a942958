"""Policies are functions of the variables and the tasks; one of the user's own is one function."""

from __future__ import annotations

from typing import Any

import pytest

from tfdist_ext.placement import (
    PlacementError,
    VariableSpec,
    greedy,
    partitioned,
    plan,
    round_robin,
)

SPECS = [
    VariableSpec(name, (size,)) for name, size in zip("abcdef", (8, 1, 1, 6, 2, 2), strict=True)
]


def tasks_of(policy: Any, **arguments: Any) -> dict[str, tuple[int, ...]]:
    made = plan(SPECS, 2, policy=policy, **arguments)
    return {spec.path: tuple(s.task for s in made.shards_of(spec.path)) for spec in SPECS}


def test_round_robin_counts_and_ignores_bytes() -> None:
    expected = {"a": (0,), "b": (1,), "c": (0,), "d": (1,), "e": (0,), "f": (1,)}
    assert tasks_of(round_robin) == tasks_of("round_robin") == expected
    # Pieces count one by one, and what rules have placed is not counted.
    rules = {"a": "sharded(2)", "b": "task 0"}
    expected = {"a": (0, 1), "b": (0,), "c": (0,), "d": (1,), "e": (0,), "f": (1,)}
    assert tasks_of(round_robin, rules=rules) == expected


def test_greedy_takes_the_emptiest_in_the_order_of_creation() -> None:
    expected = {"a": (0,), "b": (1,), "c": (1,), "d": (1,), "e": (0,), "f": (1,)}
    assert tasks_of(greedy) == tasks_of("greedy") == expected
    # It knows what rules have put there.
    assert tasks_of(greedy, rules={"f": "task 1", "a": "task 1"})["b"] == (0,)


def test_a_policy_of_ones_own() -> None:
    def by_name(specs: Any, tasks: Any) -> list[list[int]]:
        assert tasks.count == 2
        assert tasks.filled == (0, 24)
        assert tasks.budgets == (1000, 1000)
        assert tasks.pieces == {"a": 2}
        return [[0, 1] if spec.path == "a" else [ord(spec.path) % 2] for spec in specs]

    rules = {"d": "task 1", "a": "sharded(2)"}
    expected = {"a": (0, 1), "b": (0,), "c": (1,), "d": (1,), "e": (1,), "f": (0,)}
    assert tasks_of(by_name, rules=rules, budget=1000) == expected


@pytest.mark.parametrize(
    ("answer", "named"),
    [
        ([[0]], r"mine must place all 6 variables, got the tasks of 1\. It"),
        ([[0] * 4, [1], [2], [0], [0], [0]], "must name tasks from 0 to 1, got 2 for 'c'"),
        ([[0] * 4, [-1], [0], [0], [0], [0]], r"mine must name tasks from 0 to .*got \-1 for 'b'"),
        ([[0] * 4, [0, 1], [0], [0], [0], [0]], "must cut 'b' .* into at most 1 pieces, got 2"),
        ([[], [0], [0], [0], [0], [0]], r"must cut 'a' .* got 0"),
        ([[0, 1], [0], [0], [0], [0], [0]], "must cut 'a' into 4 pieces, as a rule .* asks, got 2"),
        ([0, 1, 0, 1, 0, 1], "a list with the tasks of each"),
        ([["x"]] * 6, "a list with the tasks of each"),
        (None, "a list with the tasks of each"),
    ],
)
def test_what_a_policy_may_not_answer(answer: Any, named: str) -> None:
    def mine(specs: Any, tasks: Any) -> Any:
        return answer

    with pytest.raises(PlacementError, match=named) as error:
        plan(SPECS, 2, policy=mine, rules={"a": "sharded(4)"})
    assert "mine" in str(error.value)


def test_partitioners_take_their_own_types() -> None:
    seen = []

    def halves(shape: Any, dtype: Any) -> list[int]:
        seen.append((shape, dtype))
        return [2] + [1] * (len(shape) - 1)

    policy = partitioned(halves, greedy, shape_type=list, dtype_type=str.upper)
    specs = [VariableSpec("t", (9, 2)), VariableSpec("s", ()), VariableSpec("one", (1,))]
    made = plan(specs, 2, policy=policy)
    assert seen == [([9, 2], "FLOAT32"), ([1], "FLOAT32")]  # a scalar is never cut
    assert made.shards_of("t") == ((0, 0, 5), (1, 5, 9))
    assert len(made.shards_of("one")) == 1  # no more pieces than rows, as TensorFlow does
    # A rule goes before the partitioner.
    assert len(plan(specs, 2, policy=policy, rules={"t": "sharded(3)"}).shards_of("t")) == 3


def test_a_partitioner_cuts_along_axis_0_only() -> None:
    for answer in ([1, 2], [0, 1], []):
        policy = partitioned(lambda shape, dtype, answer=answer: answer)
        with pytest.raises(PlacementError, match=r"must cut 't' of shape \(9, .*all other numbers"):
            plan([VariableSpec("t", (9, 2))], 2, policy=policy)


def test_a_policy_that_overflows_says_what_it_needs() -> None:
    specs = [VariableSpec(name, (100,)) for name in "abc"]
    with pytest.raises(PlacementError, match="3 ps tasks would do") as error:
        plan(specs, 2, policy="round_robin", budget=500)
    assert (error.value.smallest_budget, error.value.smallest_tasks) == (800, 3)
    # The planner cuts.
    assert max(plan(specs, 2, budget=600).bytes_by_task) == 600
