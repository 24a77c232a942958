"""The pytest plugin, which `pip install tfdist_ext` registers: markers, fixtures, one option.

What must run in processes of its own runs there as a pytest of its own, on that one test: with its
fixtures, its conftest files and its rewritten assertions. Reports come back.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import pytest

from tfdist_ext.errors import StrategyError
from tfdist_ext.testing.cluster_fixture import Cluster
from tfdist_ext.testing.matrix import DEFAULT, Case, case_of
from tfdist_ext.testing.own_processes import OwnProcesses, failed, in_own_processes
from tfdist_ext.testing.tasks import in_task

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
def cluster() -> Cluster:
    """The cluster of a test marked with `cluster`, as the task sees it that runs the test."""
    supervisor = in_task.supervisor()
    if supervisor is None or "TF_CONFIG" not in os.environ:
        pytest.fail("the fixture `cluster` is for tests marked with @pytest.mark.cluster(worker=2)")
    return Cluster(supervisor)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Run a test in processes of its own where it has to; else pytest goes on."""
    if in_task.supervisor() is not None or item.config.getoption("setuponly"):
        return None
    try:
        own = _own_processes(item)
        if own is None:
            return None
        run = functools.partial(in_own_processes, item, own)
    except StrategyError as error:
        run = functools.partial(failed, item, str(error))
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in run():
        item.ihook.pytest_runtest_logreport(report=report)
    _end_what_is_not_needed(item, nextitem)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def _end_what_is_not_needed(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End the fixtures that the test before left for this one, as of its module.

    pytest does so at the end of each test, and stops at the next one if it was not done. It has no
    public name: its hook for it is for tests that were set up here.
    """
    end = functools.partial(item.session._setupstate.teardown_exact, nextitem)
    call = pytest.CallInfo.from_call(end, when="teardown")
    if call.excinfo is not None:
        report = item.ihook.pytest_runtest_makereport(item=item, call=call)
        item.ihook.pytest_runtest_logreport(report=report)


def _own_processes(item: pytest.Item) -> OwnProcesses | None:
    """The processes that a test needs, None where this one will do."""
    case = _case(item)
    cpus = _number_of_cpus(item, case)
    marker = item.get_closest_marker("cluster")
    if marker is not None:
        wanted = {"timeout": 60.0, **marker.kwargs}
        timeout = wanted.pop("timeout")
        if marker.args or not wanted:
            raise StrategyError(
                f"write the mark as @pytest.mark.cluster(worker=2, ps=1); {marker.args!r} arrived."
            )
        if case is not None and case.workers not in (0, wanted.get("worker")):
            raise StrategyError(
                f"the test's mark asks for {wanted}, and its strategy is {case.name}, which has"
                f" {case.workers} workers. Leave one of them out."
            )
        return OwnProcesses(wanted, cpus or 1, timeout)
    if case is not None and case.workers:
        return OwnProcesses({"worker": case.workers}, cpus or 1)
    if cpus and not _can_have_cpus(cpus):
        return OwnProcesses(None, cpus)
    return None


def _case(item: pytest.Item) -> Case | None:
    """The strategy that the fixture of this plugin will give the test."""
    given = getattr(item, "callspec", None)
    case = None if given is None else given.params.get("strategy")
    return case if isinstance(case, Case) else None


def _number_of_cpus(item: pytest.Item, case: Case | None) -> int | None:
    marker = item.get_closest_marker("logical_cpus")
    wanted = case.logical_cpus if case is not None and case.logical_cpus > 1 else None
    if marker is None:
        return wanted
    if len(marker.args) != 1 or marker.kwargs or type(marker.args[0]) is not int:
        raise StrategyError(
            f"write the mark as @pytest.mark.logical_cpus(4); {marker.args!r} arrived."
        )
    return max(marker.args[0], wanted or 1)


def _can_have_cpus(count: int) -> bool:
    """Have TensorFlow see this many CPUs in this process, unless it has started with others."""
    from tfdist_ext.testing.devices import logical_cpus

    try:
        logical_cpus(count)
    except StrategyError:
        return False
    return True
