"""The kit passes for a strategy of TensorFlow, for the template and for the page's strategy.

Variables in pieces: `tests/strategies/test_placed_in_pieces.py`.
`scripts/figures/conformance` runs all checks on all of them.
"""

from __future__ import annotations

import re

import pytest
from check_results import check_names, known_fault
from conformance_matrix import (
    MATRIX,
    PAGE,
    Frugal,
    Mirrored,
    Placed,
    Template,
)


def test_table_on_the_page_has_these_checks_and_faults() -> None:
    text = PAGE.read_text(encoding="utf-8")
    between = text.split("<!-- conformance begin -->")[1].split("<!-- conformance end -->")[0]
    header, _, *rows = [
        re.split(r" ?\| ?", line)[1:-1] for line in between.splitlines() if line.startswith("|")
    ]
    assert header == ["check", *MATRIX]
    checks = check_names(next(iter(MATRIX.values())))
    assert [row[0] for row in rows] == [c.removeprefix("test_").replace("_", " ") for c in checks]
    for row, check in zip(rows, checks, strict=True):
        for verdict, tests in zip(row[1:], MATRIX.values(), strict=True):
            fault = known_fault(tests, check)
            assert verdict == ("passed" if fault is None else "known fault")
            assert fault is None or fault in between


@pytest.mark.long("trains_like_one_device")  # tests/exactness compares trainings
class TestMirrored(Mirrored):
    pass


@pytest.mark.long
class TestTemplate(Template):
    pass


@pytest.mark.long
class TestPlaced(Placed):
    pass


@pytest.mark.long
class TestFrugal(Frugal):
    pass
