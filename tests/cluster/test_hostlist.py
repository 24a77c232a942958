"""Slurm's compact lists."""

from __future__ import annotations

import pytest

from tfdist_ext.cluster.environments.ranked import expand_counts, expand_hosts
from tfdist_ext.errors import ClusterConfigError

HOSTS = (
    ("node[10,2]", ["node10", "node2"], "a list in an order of its own keeps it"),
    ("n[001-003,07]", ["n001", "n002", "n003", "n07"], "padding is that of each range"),
    ("n[099-101]", ["n099", "n100", "n101"], "padding is outgrown"),
    ("r[0-1]n[0-1]", ["r0n0", "r0n1", "r1n0", "r1n1"], "the last bracket runs fastest"),
    ("node10,node2", ["node10", "node2"], "the order written, for plain names too"),
    ("n[1-2].a.example", ["n1.a.example", "n2.a.example"], "domain names"),
)


@pytest.mark.parametrize(("text", "expected", "why"), HOSTS)
def test_host_list_is_expanded_in_order(text: str, expected: list[str], why: str) -> None:
    assert expand_hosts(text, "LIST", "test") == expected, why


@pytest.mark.parametrize(
    "text",
    ["", "a,", "n[1", "n[1-]", "n[a-b]", "n[2-1]", "a b", "n[[1]]", "n[0-999999999]"],
)
def test_invalid_host_list_is_refused(text: str) -> None:
    with pytest.raises(ClusterConfigError, match=r"^test: LIST .*, got '") as caught:
        expand_hosts(text, "LIST", "test")
    assert len(str(caught.value)) < 400


COUNTS = (
    ("2(x3),1", [2, 2, 2, 1], "the form of Slurm's manual"),
    ("1,2,1", [1, 2, 1], "no repetition"),
)


@pytest.mark.parametrize(("text", "expected", "why"), COUNTS)
def test_counts_are_expanded(text: str, expected: list[int], why: str) -> None:
    assert expand_counts(text, "COUNTS", "test") == expected, why


@pytest.mark.parametrize("text", ["", "x", "2(x)", "-1", "1,"])
def test_invalid_counts_are_refused(text: str) -> None:
    with pytest.raises(ClusterConfigError, match=r"^test: COUNTS .*, got '"):
        expand_counts(text, "COUNTS", "test")
