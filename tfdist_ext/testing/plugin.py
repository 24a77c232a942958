"""The pytest plugin, which `pip install tfdist_ext` registers: markers, fixtures, one option.

What must run in processes of its own runs there as a pytest of its own, on that one test: with its
fixtures, its conftest files and its rewritten assertions. Reports come back.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tfdist_ext.testing import in_task
from tfdist_ext.testing.cluster_fixture import Cluster
from tfdist_ext.testing.matrix import DEFAULT, Case, case_of
from tfdist_ext.testing.remote import OwnProcesses, in_own_processes, report_of

__all__: list[str] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("tfdist_ext").addoption(
        "--tfdist-strategies",
        default=",".join(DEFAULT),
        help="strategies that the fixture `strategy` goes through, as mirrored_2,central_3,mwms_2",
    )


def pytest_configure(config: pytest.Config) -> None:
    for line in (
        "logical_cpus(n): the test sees n CPUs; in a process of its own where TensorFlow has"
        " started with another number",
        "cluster(worker=2, ps=0, chief=None, timeout=60): the test runs once in each task of a"
        " cluster of processes on this machine",
    ):
        config.addinivalue_line("markers", line)
    names = config.getoption("--tfdist-strategies").split(",")
    config.pluginmanager.register(_StrategyFixture.of([case_of(name) for name in names]))


class _StrategyFixture:
    """Made when the option is known, which says how often a test with the fixture runs."""

    @staticmethod
    def of(cases: list[Case]) -> Any:
        class Fixture:
            @pytest.fixture(params=cases, ids=[case.name for case in cases])
            def strategy(self, request: pytest.FixtureRequest) -> Any:
                """A strategy of the matrix; the test's id says which."""
                return request.param.make()

        return Fixture()


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """The cluster of a test marked with `cluster`, as the task sees it that runs the test."""
    supervisor = in_task.supervisor()
    if supervisor is None or "TF_CONFIG" not in os.environ:
        pytest.fail("the fixture `cluster` is for tests marked with @pytest.mark.cluster(worker=2)")
    yield Cluster(supervisor)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Run a test in processes of its own where it has to; else pytest goes on."""
    del nextitem
    if in_task.supervisor() is not None:
        return None
    own = _own_processes(item)
    if own is None:
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in in_own_processes(item, own):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def _own_processes(item: pytest.Item) -> OwnProcesses | None:
    ...
