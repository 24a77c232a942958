"""The pytest plugin that this package registers: two marks, two fixtures, one option.

pytest imports this module in every session on the machine, so it imports nothing but pytest. The
modules behind a mark or a fixture are imported when a test uses it. All names begin with `tfdist`.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tfdist_ext.testing.isolated_run import Cluster

__all__: list[str] = []

_MARKS = (
    "tfdist_logical_cpus(n): TensorFlow sees n CPUs; the test runs in a new process if"
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
    """Parametrize the fixture `tfdist_strategy`."""
    if "tfdist_strategy" in metafunc.fixturenames and not _is_parametrized(metafunc.definition):
        names = _strategy_names(metafunc.config)
        metafunc.parametrize("tfdist_strategy", names, indirect=True)


@pytest.fixture
def tfdist_strategy(request: pytest.FixtureRequest) -> Any:
    """Each strategy of the matrix in turn; the id of the test says which."""
    from tfdist_ext.testing.matrix import case_of

    if not hasattr(request, "param"):
        pytest.fail(
            "the fixture `tfdist_strategy` must be an argument of the test or of one of its"
            " fixtures; request.getfixturevalue cannot run the test once for each strategy.",
            pytrace=False,
        )
    return case_of(request.param).make()


@pytest.fixture
def tfdist_cluster(pytestconfig: pytest.Config) -> Cluster:
    """The cluster of a test marked with `tfdist_cluster`, seen from the task that runs the test."""
    from tfdist_ext.cluster import ClusterConfig
    from tfdist_ext.testing.isolated_run import Cluster

    config = ClusterConfig.from_env()
    if not _is_task(pytestconfig) or config is None:
        pytest.fail(
            "the fixture `tfdist_cluster` needs a cluster: mark the test with"
            " @pytest.mark.tfdist_cluster(worker=2).",
            pytrace=False,
        )
    return Cluster(Path(pytestconfig.getoption("tfdist_folder")), config)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Run a test in processes of its own if it needs them, and its fixtures, too."""
    if _is_task(item.config) or not (_is_marked(item) or _strategy_of(item)):
        return
    from tfdist_ext.errors import TfDistError
    from tfdist_ext.testing.isolated_run import needs_of, run_isolated

    try:
        needs = needs_of(item, _strategy_of(item))
    except TfDistError as error:
        raise pytest.fail.Exception(str(error), pytrace=False) from None
    if isinstance(item, pytest.Function) and not needs.are_met_here():
        item.funcargs.update(dict.fromkeys(item.fixturenames))  # pytest takes them as they are
        # Not by a hook: a method of a unittest.TestCase calls none.
        item.runtest = functools.partial(run_isolated, item, needs)  # type: ignore[method-assign]


def _is_marked(item: pytest.Item) -> bool:
    marks = ("tfdist_cluster", "tfdist_logical_cpus")
    return any(item.get_closest_marker(name) is not None for name in marks)


def _is_parametrized(item: pytest.Item) -> bool:
    """Whether a `parametrize` mark of the test gives the strategies itself."""
    marks = item.iter_markers("parametrize")
    return any("tfdist_strategy" in str(mark.args[:1] or mark.kwargs) for mark in marks)


def _strategy_of(item: pytest.Item) -> str | None:
    """The name of the strategy that the fixture `tfdist_strategy` gives the test."""
    call = getattr(item, "callspec", None)
    name = None if call is None else call.params.get("tfdist_strategy")
    return name if isinstance(name, str) else None


def _strategy_names(config: pytest.Config) -> list[str]:
    from tfdist_ext.errors import StrategyError
    from tfdist_ext.testing.matrix import DEFAULT, case_of

    names = config.getoption("--tfdist-strategies")
    try:
        return [case_of(name).name for name in (DEFAULT if names is None else names.split(","))]
    except StrategyError as error:
        raise pytest.UsageError(f"--tfdist-strategies: {error}") from None


def _is_task(config: pytest.Config) -> bool:
    """Whether this pytest runs one test in a task; see `isolated_run`."""
    return config.getoption("tfdist_folder", None) is not None
