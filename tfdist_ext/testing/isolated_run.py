"""A test that needs processes of its own: which, running it there, and its reports.

Each process has a pytest of its own that runs that test alone, with its fixtures, its conftest
files and its rewritten assertions.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from tfdist_ext.cluster import ClusterConfig, Task
from tfdist_ext.errors import LaunchError, StrategyError, TfDistError
from tfdist_ext.testing.matrix import case_of, logical_cpus
from tfdist_ext.testing.tasks import check_timeout, supervise, task_counts
from tfdist_ext.testing.tasks.in_task import Supervisor, TaskFailure, supervisor

__all__ = [
    "Cluster",
    "IsolatedRun",
    "mark_error",
    "needed_by",
    "run_isolated",
    "running_cluster",
    "setup_error",
]


@dataclass(frozen=True)
class IsolatedRun:
    """The processes that a test needs.

    Attributes:
        cluster: numbers of tasks, None for one process without a cluster.
        logical_cpus: that each process sees.
        timeout: seconds.
    """

    cluster: Mapping[str, int] | None
    logical_cpus: int = 1
    timeout: float = 60.0


class Cluster:
    """The value of the fixture `tfdist_cluster`: the cluster, seen from one of its tasks.

    Attributes:
        config: the `ClusterConfig` of this task.
        attempt: how often this task was restarted.
    """

    def __init__(self, supervisor: Supervisor, config: ClusterConfig):
        self._supervisor = supervisor
        self.config = config
        self.attempt = supervisor.attempt

    @property
    def task(self) -> Task:
        """Type and index of this task."""
        return self.config.task

    def kill(self, type: str, index: int) -> None:
        """Kill a task with SIGKILL, as if its machine crashed; the test does not fail by that.

        Raises:
            LaunchError: there is no such task.
        """
        self._supervisor.request("kill", f"{type}:{index}")

    def restart(self, type: str, index: int) -> None:
        """Start a task again, at its address: it runs the test from the beginning.

        It is killed first if it still runs.

        Raises:
            LaunchError: there is no such task.
        """
        self._supervisor.request("restart", f"{type}:{index}")


def running_cluster() -> Cluster | None:
    """The cluster of the test that runs in this process, None where it has none."""
    here, config = supervisor(), ClusterConfig.from_env()
    return None if here is None or config is None else Cluster(here, config)


def mark_error(item: pytest.Item) -> str | None:
    """A message on wrong marks of a test; None where they are right."""
    try:
        _cluster_of(item)
        _logical_cpus_of(item)
    except TfDistError as error:
        return str(error)
    return None


def needed_by(item: pytest.Item, strategy: str | None) -> IsolatedRun | None:
    """The processes that a test needs, None where it can run in this one.

    Args:
        strategy: name of the strategy that the fixture `tfdist_strategy` gives the test.

    Raises:
        TfDistError: its marks or its strategy are wrong, or contradict each other.
    """
    case = None if strategy is None else case_of(strategy)
    of_case = case.logical_cpus if case is not None and case.logical_cpus > 1 else 0
    cpus = max(_logical_cpus_of(item) or 0, of_case)  # 0: any number will do
    if cluster := _cluster_of(item):
        counts, timeout = cluster
        if case is not None and case.workers not in (0, counts.get("worker")):
            raise StrategyError(
                f"the mark and the strategy of a test must agree on the number of workers, got"
                f" {counts} and {case.name}, which has {case.workers} workers: remove one of them."
            )
        return IsolatedRun(counts, cpus or 1, timeout)
    if case is not None and case.workers:
        return IsolatedRun({"worker": case.workers}, cpus or 1)
    if cpus and not _can_have_cpus(cpus):
        return IsolatedRun(None, cpus)
    return None


def _cluster_of(item: pytest.Item) -> tuple[dict[str, int], float] | None:
    """Numbers of tasks and seconds of the mark `tfdist_cluster`."""
    mark = item.get_closest_marker("tfdist_cluster")
    if mark is None:
        return None
    counts = {"timeout": 60.0, **mark.kwargs}
    timeout = counts.pop("timeout")
    if mark.args or not counts:
        raise LaunchError(
            f"tfdist_cluster must get numbers of tasks by name, got {mark.args!r}: write"
            " @pytest.mark.tfdist_cluster(worker=2, ps=1)."
        )
    check_timeout(timeout)
    task_counts(counts)
    return counts, timeout


def _logical_cpus_of(item: pytest.Item) -> int | None:
    """The number of the mark `tfdist_logical_cpus`."""
    mark = item.get_closest_marker("tfdist_logical_cpus")
    if mark is None:
        return None
    if len(mark.args) != 1 or mark.kwargs or type(mark.args[0]) is not int or mark.args[0] < 1:
        got = ", ".join([*map(repr, mark.args), *(f"{k}={v!r}" for k, v in mark.kwargs.items())])
        raise StrategyError(
            f"tfdist_logical_cpus must get one integer from 1, got ({got}): write"
            " @pytest.mark.tfdist_logical_cpus(4)."
        )
    return mark.args[0]


def _can_have_cpus(count: int) -> bool:
    """Make this many logical CPUs here; False where TensorFlow has started with others."""
    try:
        logical_cpus(count)
    except StrategyError:
        return False
    return True


def run_isolated(item: pytest.Item, run: IsolatedRun) -> list[pytest.TestReport]:
    """Run the test in its processes; the reports for this session."""
    found: dict[str, list[pytest.TestReport]] = {}

    def on_message(task: str, kind: str, value: Any) -> None:
        report = item.config.hook.pytest_report_from_serializable(config=item.config, data=value)
        found.setdefault(task, []).append(report)

    began = time.monotonic()
    arguments, options = _arguments(item), _options(item.config)
    folder = str(item.config.invocation_params.dir)
    try:
        results = supervise(
            _run,
            run.cluster,
            run.timeout,
            args=(arguments, options, folder),
            on_message=on_message,
            logical_cpus=run.logical_cpus,
        )
    except LaunchError as error:
        return _failed(item, str(error))
    for task, reports in found.items():
        if wrong := [_text_of(report) for report in reports if report.failed]:
            return _failed(item, f"{task}: {wrong[0]}")  # also of one that was killed after it
    ends = {task for task, reports in found.items() if any(r.when == "teardown" for r in reports)}
    if without := [task for task in results if task not in ends]:
        return _failed(item, f"{without[0]} ended before the test did.")
    chosen = _combined(item, list(found.values()))
    chosen[0].duration += time.monotonic() - began - sum(report.duration for report in chosen)
    shown = next((report for report in chosen if report.when == "call"), chosen[0])
    for task, text in results.outputs.items():
        if text:
            shown.sections.append((f"Captured output of {task}", text))
            if item.config.getoption("capture") == "no":
                sys.stdout.write(f"---- output of {task}\n{text}")
    return chosen


def setup_error(item: pytest.Item, text: str) -> list[pytest.TestReport]:
    """The reports of a test that cannot run, with this message and no traceback."""
    return [_report(item, "setup", "failed", text), _report(item, "teardown", "passed")]


def _failed(item: pytest.Item, text: str) -> list[pytest.TestReport]:
    """The reports of a test that failed, with this message and no traceback."""
    return [_report(item, "setup", "passed"), _report(item, "call", "failed", text)]


def _text_of(report: pytest.TestReport) -> str:
    """The text of a failure, its exception first: pytest's summary shows the first line."""
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is None:
        return report.longreprtext
    summary = crash.message.strip().partition("\n")[0]
    return f"{summary}\n\n" + report.longreprtext.lstrip("\n")


def _combined(item: pytest.Item, by_task: list[list[pytest.TestReport]]) -> list[pytest.TestReport]:
    """The reports of a task in which the test ran, or of one that skipped it as all did."""
    if not by_task:
        return _failed(item, "no task has run the test: all were ended.")
    ran = [reports for reports in by_task if any(r.when == "call" and r.passed for r in reports)]
    chosen = (ran or by_task)[0]
    for report in chosen:
        report.nodeid, report.location = item.nodeid, item.location
    return chosen


def _report(item: pytest.Item, when: Any, outcome: Any, text: str = "") -> pytest.TestReport:
    return pytest.TestReport(
        item.nodeid, item.location, dict.fromkeys(item.keywords, 1), outcome, text or None, when
    )


def _arguments(item: pytest.Item) -> list[str]:
    """The arguments for the pytest of a task."""
    config = item.config
    _, *rest = item.nodeid.split("::")
    arguments = ["::".join([str(item.path), *rest]), "--rootdir", str(config.rootpath)]
    if config.inipath is not None:
        arguments += ["-c", str(config.inipath)]
    for warning in config.getoption("pythonwarnings") or ():
        arguments += ["-W", warning]
    for setting in config.getoption("override_ini") or ():
        arguments += ["-o", setting]
    # The supervisor has the output, the time limit and the reports; modules were imported before
    # this pytest could rewrite their assertions.
    arguments += ["-s", "-p", "no:faulthandler"]
    arguments += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    arguments += ["--import-mode", config.getoption("importmode")]
    for name in config.getoption("plugins") or ():
        arguments += ["-p", name]
    for plugin, without in (("xdist", ["-n", "0"]), ("timeout", ["--timeout", "0"])):
        if config.pluginmanager.hasplugin(plugin):
            arguments += without
    return arguments


# Options of pytest and its plugins that are of the session, or that the supervisor sees to.
# fmt: off
_OF_THE_SESSION = {
    "basetemp", "cacheclear", "cacheshow", "capture", "collectonly", "confcutdir", "durations",
    "durations_min", "failedfirst", "file_or_dir", "help", "inifilename",
    "last_failed_no_failures", "lf", "newfirst", "override_ini", "pastebin", "plugins",
    "pythonwarnings", "report_log", "rootdir", "setupshow", "stepwise", "stepwise_reset",
    "stepwise_skip", "timeout", "timeout_method", "session_timeout", "trace", "usepdb",
    "version", "xmlpath", "dist", "distload", "looponfail", "maxprocesses", "maxworkerrestart",
    "numprocesses", "px", "rsyncdir", "testrunuid", "tx",
}
# fmt: on
# A task's pytest has one test, which was chosen already.
_OF_CHOICE: dict[str, Any] = {
    "deselect": None,
    "ignore": None,
    "ignore_glob": None,
    "keyword": "",
    "markexpr": "",
    "maxfail": 0,
}


def _options(config: pytest.Config) -> dict[str, Any]:
    """The session's options as they are now, those of conftest files included, for a task."""

    options = {}
    for name, value in vars(config.option).items():
        if name not in _OF_THE_SESSION:
            with contextlib.suppress(Exception):  # it cannot be sent to another process
                pickle.dumps(value)
                options[name] = value
    return options | _OF_CHOICE


def _run(arguments: list[str], options: dict[str, Any], folder: str) -> None:
    os.chdir(folder)
    here = supervisor()
    assert here is not None
    # Not the folder that all runs of pytest share: those that begin at once would meet in it.
    own = os.path.join(here.folder, f"{here.name.replace(':', '-')}-{here.attempt}")
    arguments = [*arguments, "--basetemp", own]
    if "no:cacheprovider" not in arguments:
        arguments += ["-o", f"cache_dir={own}-cache"]
    reporter = _Reporter(options)
    status = pytest.main(arguments, plugins=[reporter])
    if status != pytest.ExitCode.OK:
        text = "\n".join(reporter.failed) or f"pytest ended with {pytest.ExitCode(status)!r}."
        raise TaskFailure(text)


class _Reporter:
    """A plugin of a task's pytest: sends its reports to the supervisor."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.failed: list[str] = []
        self._options = options

    @pytest.hookimpl(tryfirst=True)
    def pytest_cmdline_main(self, config: pytest.Config) -> None:
        vars(config.option).update(self._options)  # before anybody looks at them

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        self._config = config
        # Nothing is written to a terminal. Its plugin stays, for its options in `addopts` (-ra).
        config.pluginmanager.unregister(name="terminalreporter")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(_text_of(report))
        to_data = self._config.hook.pytest_report_to_serializable
        there = supervisor()
        assert there is not None
        there.send("report", to_data(config=self._config, report=report))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed.append(report.longreprtext)
