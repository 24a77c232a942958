"""The pytest plugin that this package registers: two marks, two fixtures, one option.

pytest imports this module in every session on the machine, so it imports nothing but pytest: what
a mark or a fixture needs is imported when a test uses it. All names begin with `tfdist`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tfdist_ext.testing.isolated_run import Cluster, IsolatedRun

__all__: list[str] = []

_MARKS = (
    "tfdist_logical_cpus(n): TensorFlow sees n CPUs; the test gets a process of its own where"
    " TensorFlow has started with another number",
    "tfdist_cluster(worker=2, ps=0, chief=None, evaluator=0, timeout=60): the test runs once in"
    " each task of a cluster of processes on this machine",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("tfdist_ext").addoption(
        "--tfdist-strategies",
        metavar="NAMES",
        help="strategies for the fixture `tfdist_strategy`, separated by commas, such as"
        " mirrored_2,central_storage_3,multi_worker_2",
    )


def pytest_configure(config: pytest.Config) -> None:
    for line in _MARKS:
        config.addinivalue_line("markers", line)
    if config.getoption("--tfdist-strategies") is not None:
        _strategy_names(config)  # a name that is wrong ends the session before it begins


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Check the marks of a test, and parametrize the fixture `tfdist_strategy`."""
    if _is_marked(metafunc.definition):
        from tfdist_ext.testing.isolated_run import mark_error

        if error := mark_error(metafunc.definition):
            pytest.fail(f"In {metafunc.definition.name}: {error}", pytrace=False)
    if "tfdist_strategy" in metafunc.fixturenames and not _is_parametrized(metafunc.definition):
        names = _strategy_names(metafunc.config)
        metafunc.parametrize("tfdist_strategy", names, indirect=True)


@pytest.fixture
def tfdist_strategy(request: pytest.FixtureRequest) -> Any:
    """Each strategy of the matrix in turn; the id of the test says which."""
    from tfdist_ext.errors import StrategyError
    from tfdist_ext.testing.matrix import case_of

    if not hasattr(request, "param"):
        pytest.fail(
            "the fixture `tfdist_strategy` must be an argument of the test or of one of its"
            " fixtures; request.getfixturevalue cannot run the test once for each strategy.",
            pytrace=False,
        )
    try:
        case = case_of(request.param)
    except StrategyError as error:
        pytest.fail(str(error), pytrace=False)
    return case.make()


@pytest.fixture
def tfdist_cluster() -> Cluster:
    """The cluster of a test marked with `tfdist_cluster`, seen from the task that runs the test."""
    from tfdist_ext.testing.isolated_run import running_cluster

    cluster = running_cluster()
    if cluster is None:
        pytest.fail(
            "the fixture `tfdist_cluster` needs a cluster: mark the test with"
            " @pytest.mark.tfdist_cluster(worker=2).",
            pytrace=False,
        )
    return cluster


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Run a test in processes of its own where it needs them; leave the others to pytest."""
    if not _is_marked(item) and _strategy_of(item) is None:
        return None
    if _is_task() or item.config.getoption("setuponly"):
        return None
    from tfdist_ext.errors import TfDistError
    from tfdist_ext.testing import isolated_run

    reports: Callable[[], list[pytest.TestReport]]
    try:
        run: IsolatedRun | None = isolated_run.needed_by(item, _strategy_of(item))
        if run is None:
            return None
        reports = functools.partial(isolated_run.run_isolated, item, run)
    except TfDistError as error:
        reports = functools.partial(isolated_run.setup_error, item, str(error))
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in reports():
        item.ihook.pytest_runtest_logreport(report=report)
    _teardown_fixtures(item, nextitem)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def _teardown_fixtures(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Tear down the fixtures that `nextitem` does not share, such as those of the last module.

    pytest does so at the end of each test, and stops at the next one if it was not done. It has no
    public name for it: its hook is for tests that were set up in this process.
    """
    teardown = functools.partial(item.session._setupstate.teardown_exact, nextitem)
    call = pytest.CallInfo.from_call(teardown, when="teardown")
    if call.excinfo is not None:
        report = item.ihook.pytest_runtest_makereport(item=item, call=call)
        item.ihook.pytest_runtest_logreport(report=report)


def _is_marked(item: pytest.Item) -> bool:
    marks = ("tfdist_cluster", "tfdist_logical_cpus")
    return any(item.get_closest_marker(name) is not None for name in marks)


def _is_parametrized(item: pytest.Item) -> bool:
    """Whether a `parametrize` mark of the test gives the strategies itself."""
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0] if mark.args else mark.kwargs.get("argnames", ())
        names = names.split(",") if isinstance(names, str) else names
        if "tfdist_strategy" in [name.strip() for name in names]:
            return True
    return False


def _strategy_of(item: pytest.Item) -> str | None:
    """The name of the strategy that the fixture `tfdist_strategy` gives the test."""
    call = getattr(item, "callspec", None)
    name = None if call is None else call.params.get("tfdist_strategy")
    return name if isinstance(name, str) else None


def _strategy_names(config: pytest.Config) -> list[str]:
    from tfdist_ext.errors import StrategyError
    from tfdist_ext.testing.matrix import DEFAULT, case_of

    given = config.getoption("--tfdist-strategies")
    try:
        return [case_of(name).name for name in (DEFAULT if given is None else given.split(","))]
    except StrategyError as error:
        raise pytest.UsageError(f"--tfdist-strategies: {error}") from None


def _is_task() -> bool:
    """Whether this process is a task. The module that makes it one is imported there already."""
    in_task = sys.modules.get("tfdist_ext.testing.tasks.in_task")
    return in_task is not None and in_task.supervisor() is not None
