"""A test that needs processes of its own: each of them runs the test in a pytest of its own.

The pytest of a task runs this test alone, with its fixtures, its conftest files and its rewritten
assertions, and writes its reports to a file. Marks and fixtures say which processes it needs.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import re
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tfdist_ext.cluster import ClusterConfig, Task
from tfdist_ext.errors import LaunchError, StrategyError
from tfdist_ext.launcher.function_task import PID
from tfdist_ext.testing.matrix import case_of, logical_cpus
from tfdist_ext.testing.tasks import check_timeout, options_of_tasks, run_function

# Suffixes of files of a task: its reports, and whether it was killed. The process that replaces a
# task that was killed runs no test.
_REPORTS, _KILLED = ".reports", ".killed"
_LOOK_EVERY = 0.02  # seconds


@dataclass(frozen=True)
class Needs:
    """The processes that a test needs.

    Attributes:
        cluster: numbers of tasks by type; None for one process without a cluster.
        logical_cpus: the number that each process sees; 0 for any number.
        timeout: seconds.
    """

    cluster: Mapping[str, int] | None = None
    logical_cpus: int = 0
    timeout: float = 60.0

    def are_met_here(self) -> bool:
        """Whether the test can run in this process; sets its logical CPUs if possible."""
        if self.cluster is not None:
            return False
        try:
            if self.logical_cpus:
                logical_cpus(self.logical_cpus)
        except StrategyError:  # TensorFlow has started with others
            return False
        return True


def needs_of(item: pytest.Item, strategy: str | None) -> Needs:
    """What a test needs.

    Args:
        strategy: name of the strategy that the fixture `tfdist_strategy` gives the test.

    Raises:
        TfDistError: its marks or its strategy are wrong, or contradict each other.
    """
    case = None if strategy is None else case_of(strategy)
    cpus = _cpus_of(item)
    if case is not None and case.logical_cpus > 1:
        cpus = max(cpus, case.logical_cpus)
    mark = item.get_closest_marker("tfdist_cluster")
    if mark is None:
        return Needs({"worker": case.workers} if case is not None and case.workers else None, cpus)
    counts = {"timeout": 60.0, **mark.kwargs}
    timeout = counts.pop("timeout")
    if mark.args or not counts:
        raise LaunchError(
            f"tfdist_cluster takes numbers of tasks by name, not {mark.args!r}. Write"
            " @pytest.mark.tfdist_cluster(worker=2, ps=1)."
        )
    check_timeout(timeout)
    options_of_tasks(counts)
    if case is not None and case.workers not in (0, counts.get("worker")):
        raise StrategyError(
            f"the mark of the test asks for {counts}, but its strategy {case.name} has"
            f" {case.workers} workers. Remove the mark or the strategy."
        )
    return Needs(counts, cpus, timeout)


def _cpus_of(item: pytest.Item) -> int:
    """The number of the mark `tfdist_logical_cpus`; 0 without it."""
    mark = item.get_closest_marker("tfdist_logical_cpus")
    if mark is None:
        return 0
    if len(mark.args) != 1 or mark.kwargs or type(mark.args[0]) is not int or mark.args[0] < 1:
        got = ", ".join([*map(repr, mark.args), *(f"{k}={v!r}" for k, v in mark.kwargs.items())])
        raise StrategyError(
            f"tfdist_logical_cpus takes one integer from 1, not ({got}). Write"
            " @pytest.mark.tfdist_logical_cpus(4)."
        )
    return mark.args[0]


class Cluster:
    """The value of the fixture `tfdist_cluster`: the cluster, seen from one of its tasks.

    Attributes:
        config: the `ClusterConfig` of this task.
    """

    def __init__(self, folder: Path, config: ClusterConfig):
        self._folder = folder
        self.config = config

    @property
    def task(self) -> Task:
        """Type and index of this task."""
        return self.config.task

    def kill(self, type: str, index: int) -> None:
        """Kill a task with SIGKILL, as if its machine crashed; this does not fail the test.

        Raises:
            LaunchError: there is no such task.
        """
        name, names = f"{type}:{index}", [str(task) for task in self.config.tasks()]
        if name not in names:
            raise LaunchError(f"there is no task {name}. The tasks are {', '.join(names)}.")
        if name == str(self.task):
            raise LaunchError(f"{name} cannot kill itself. Call kill in another task.")
        _kill(self._folder / name)


def _kill(task: Path) -> None:
    """Kill a task and its children, once the task has started; nothing if it was killed before."""
    killed, file = Path(f"{task}{_KILLED}"), Path(f"{task}{PID}")
    if killed.exists():
        return
    killed.touch()
    while not file.exists() or not (text := file.read_text()):
        time.sleep(_LOOK_EVERY)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(int(text), signal.SIGKILL)
        while True:
            os.kill(int(text), 0)
            time.sleep(_LOOK_EVERY)


def run_isolated(item: pytest.Item, needs: Needs) -> None:
    """Run the test in its processes, and report its result as the result of this item."""
    with tempfile.TemporaryDirectory(prefix="tfdist-") as name:
        folder = Path(name)

        def replaces(task: str, *_: Any) -> bool:
            return (folder / f"{task}{_KILLED}").exists()

        test = "::".join([str(item.path), *item.nodeid.split("::")[1:]])
        arguments = (str(folder), test, _options(item.config), needs.logical_cpus)
        ended = run_function(
            _run, arguments, needs.cluster, needs.timeout, folder=folder, replaces=replaces
        )
        reports = {file.stem: _reports_in(file, item) for file in folder.glob(f"*{_REPORTS}")}
    for task, text in ended.outputs.items():
        if text:
            item.add_report_section("call", f"output of {task}", text)
            if item.config.getoption("capture") == "no":
                sys.stdout.write(f"---- output of {task}\n{text}")
    for report in itertools.chain.from_iterable(reports.values()):
        if _has_failed_as_expected(report):
            pytest.xfail(report.wasxfail.removeprefix("reason: "))
    # The task that failed first comes first; a task that was killed may have failed before.
    for task in sorted(reports, key=lambda name: name not in ended.failed[:1]):
        if failed := [_text_of(report) for report in reports[task] if report.failed]:
            pytest.fail(f"{task}: {failed[0]}", pytrace=False)
    if ended.failed:
        pytest.fail(ended.message, pytrace=False)
    _skip_as([report for of_task in reports.values() for report in of_task])


def _skip_as(reports: list[pytest.TestReport]) -> None:
    """Skip the test where all tasks have skipped it; fail where no task has run it."""
    if any(report.when == "call" and report.passed for report in reports):
        return
    skipped = [report for report in reports if report.skipped]
    if not skipped:
        pytest.fail("no task has run the test: all tasks were killed.", pytrace=False)
    reason = skipped[0].longrepr[2] if isinstance(skipped[0].longrepr, tuple) else ""
    raise pytest.skip.Exception(reason.removeprefix("Skipped: "), _use_item_location=True)


def _has_failed_as_expected(report: pytest.TestReport) -> bool:
    return report.skipped and hasattr(report, "wasxfail")  # one that passes has `wasxfail`, too


def _text_of(report: pytest.TestReport) -> str:
    """The text of a failure, its exception first: pytest's summary shows the first line."""
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is None:
        return report.longreprtext
    summary = crash.message.strip().partition("\n")[0]
    return f"{summary}\n\n" + report.longreprtext.lstrip("\n")


def _reports_in(file: Path, item: pytest.Item) -> list[pytest.TestReport]:
    reports, from_data = [], item.config.hook.pytest_report_from_serializable
    with open(file, "rb") as stream, contextlib.suppress(EOFError, pickle.UnpicklingError):
        while True:
            reports.append(from_data(config=item.config, data=pickle.load(stream)))
    return reports


# Options that select tests, or that concern a whole session: a task gets their defaults.
_OF_THE_SESSION = re.compile(
    "collectonly|deselect|dist|failedfirst|file_or_dir|keyword|lf|markexpr|maxfail|newfirst"
    "|numprocesses|stepwise|tx|usepdb|xmlpath"
    # Files of the session: of pytest-cov, -html, -json-report, -reportlog, and Allure.
    "|allure_report_dir|cov_source|htmlpath|json_report|report_log"
)


def _options(config: pytest.Config) -> dict[str, Any]:
    """The options of this session, those of conftest files included, for the pytest of a task."""
    options = {}
    for name, value in vars(config.option).items():
        with contextlib.suppress(Exception):  # some values cannot be sent to another process
            if not _OF_THE_SESSION.fullmatch(name) and pickle.dumps(value):
                options[name] = value
    # Modules were imported before the task's pytest could rewrite their assertions.
    warnings = [*(options["pythonwarnings"] or ()), "ignore::pytest.PytestAssertRewriteWarning"]
    return options | {
        "capture": "no",
        "inifilename": None if config.inipath is None else str(config.inipath),
        "invocation_dir": str(config.invocation_params.dir),
        "pythonwarnings": warnings,
        "rootdir": str(config.rootpath),
        "timeout": 0,  # of pytest-timeout; the session has a limit for all tasks
    }


def _run(folder: str, test: str, options: dict[str, Any], cpus: int) -> None:
    """Run the test in a pytest of this task."""
    config = ClusterConfig.from_env()
    task = Path(folder) / ("process" if config is None else str(config.task))
    if Path(f"{task}{_KILLED}").exists():
        return
    if cpus > 1:
        logical_cpus(cpus)
    os.chdir(options.pop("invocation_dir"))
    # Not the folder that all runs of pytest share: concurrent runs would share that folder.
    own = str(task.with_name(task.name.replace(":", "-")))
    options |= {"basetemp": own, "tfdist_folder": folder}
    options["override_ini"] = [*(options["override_ini"] or ()), f"cache_dir={own}-cache"]
    session = pytest.Config.fromdictargs(options, [test])
    with open(f"{task}{_REPORTS}", "ab") as file:
        reporter = _Reporter(file)
        session.pluginmanager.register(reporter)
        status = session.hook.pytest_cmdline_main(config=session)
    if status != pytest.ExitCode.OK or reporter.has_failed_as_expected:
        sys.exit(1)  # which ends the other tasks
    if not reporter.has_ended:
        sys.exit("The test exited before its end.")
    sys.last_value = None  # of an exit that the test has caught


class _Reporter:
    """A plugin of a task's pytest: writes its reports to a file.

    Attributes:
        has_ended: whether the last part of the test, its teardown, was reported.
        has_failed_as_expected: whether the test has called `pytest.xfail`, or has raised an
            exception that its mark `xfail` names.
    """

    def __init__(self, file: Any) -> None:
        self.has_ended = self.has_failed_as_expected = False
        self._file = file

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        self._config = config
        # Nothing is written to a terminal. Its plugin stays, for its options.
        if config.pluginmanager.has_plugin("terminalreporter"):
            config.pluginmanager.unregister(name="terminalreporter")

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        """Leaves marks `xfail` to the session, which judges the test as a whole.

        A mark that names an exception stays: the session does not see the exception.
        """
        for node in item.listchain():
            node.own_markers = [
                mark
                for mark in node.own_markers
                if mark.name != "xfail" or mark.kwargs.get("raises")
            ]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.has_ended = report.when == "teardown"
        self.has_failed_as_expected |= _has_failed_as_expected(report)
        self._write(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write(report)

    def _write(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        to_data = self._config.hook.pytest_report_to_serializable
        pickle.dump(to_data(config=self._config, report=report), self._file)
        self._file.flush()
