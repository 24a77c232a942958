"""The kit passes for TensorFlow's strategies, for the template and for the page's strategy.

Variables in pieces: `tests/strategies/test_placed_in_pieces.py`.
`scripts/figures/conformance` runs all checks on all of them.
"""

import pytest
from conformance_matrix import CentralStorage, Frugal, Mirrored, OneDevice, Placed, Template


@pytest.mark.long("trains_like_one_device")  # tests/exactness compares trainings
class TestMirrored(Mirrored):
    pass


@pytest.mark.long
class TestCentralStorage(CentralStorage):
    pass


@pytest.mark.long
class TestOneDevice(OneDevice):
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
