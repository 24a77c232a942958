"""The kit passes for TensorFlow's strategies, for the template and for the page's strategy.

Variables in pieces: `tests/strategies/test_placed_in_pieces.py`.
`scripts/figures/conformance` runs all checks on all of them.
"""

import pytest
from conformance_matrix import CentralStorage, Frugal, Mirrored, OneDevice, Placed, Template


class Less:
    """Trainings that take long, and that tests/exactness and the new strategy's test have, too."""

    test_trains_dense_with_sgd = None


@pytest.mark.long("trains_table_with_adamw")
class TestMirrored(Less, Mirrored):
    pass


@pytest.mark.long
class TestCentralStorage(Less, CentralStorage):
    pass


@pytest.mark.long
class TestOneDevice(Less, OneDevice):
    pass


@pytest.mark.long
class TestTemplate(Less, Template):
    pass


@pytest.mark.long
class TestPlaced(Less, Placed):
    pass


@pytest.mark.long
class TestFrugal(Less, Frugal):
    pass
