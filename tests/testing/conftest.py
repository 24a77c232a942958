"""These tests use TensorFlow in this process."""

import pytest


@pytest.fixture(autouse=True, scope="session")
def _tensorflow(four_cpus: None) -> None:
    pass
