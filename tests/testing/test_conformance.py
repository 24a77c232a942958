"""The kit passes for TensorFlow's strategies, for the template and for the page's strategy.

The template with other hooks: `tests/strategies/test_template_contract.py`.
`scripts/figures/conformance` runs all checks on all of them.
"""

from conformance_matrix import CentralStorage, Frugal, Mirrored, OneDevice, Placed, Template


class Less:
    """Trainings that take long, and that tests/exactness and the new strategy's test have, too."""

    test_trains_dense_with_sgd = None
    test_trains_dense_with_adamw = None
    test_trains_table_with_sgd = None


class TestMirrored(Less, Mirrored):
    pass


class TestCentralStorage(Less, CentralStorage):
    pass


class TestOneDevice(Less, OneDevice):
    pass


class TestTemplate(Less, Template):
    pass


class TestPlaced(Less, Placed):
    pass


class TestFrugal(Less, Frugal):
    pass
