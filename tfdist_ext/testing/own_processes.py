"""A pytest test in processes of its own, each with a pytest that runs that test alone."""

from __future__ import annotations

import os
import pickle
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from tfdist_ext.errors import LaunchError
from tfdist_ext.testing.tasks import supervise
from tfdist_ext.testing.tasks.in_task import SaidError, supervisor

__all__ = ["OwnProcesses", "failed", "in_own_processes"]


@dataclass(frozen=True)
class OwnProcesses:
    """What a test needs.

    Attributes:
        cluster: numbers of tasks, None for one process without a cluster.
        logical_cpus: that each process sees.
        timeout: seconds.
    """

    cluster: Mapping[str, int] | None
    logical_cpus: int = 1
    timeout: float = 60.0


def in_own_processes(item: pytest.Item, own: OwnProcesses) -> list[pytest.TestReport]:
    """Run the test there; the reports that pytest is to be given."""
    found: dict[str, list[pytest.TestReport]] = {}

    def told(task: str, kind: str, value: Any) -> None:
        report = item.config.hook.pytest_report_from_serializable(config=item.config, data=value)
        found.setdefault(task, []).append(report)

    began = time.monotonic()
    arguments, options = _arguments(item), _options(item.config)
    folder = str(item.config.invocation_params.dir)
    try:
        results = supervise(
            _run,
            own.cluster,
            own.timeout,
            args=(arguments, options, folder),
            told=told,
            logical_cpus=own.logical_cpus,
        )
    except LaunchError as error:
        return failed(item, str(error))
    for task, reports in found.items():
        if wrong := [report.longreprtext for report in reports if report.failed]:
            return failed(item, f"{task}: {wrong[0]}")  # also of one that was killed after it
    ends = {task for task, reports in found.items() if any(r.when == "teardown" for r in reports)}
    if without := [task for task in results if task not in ends]:
        return failed(item, f"{without[0]} ended before the test did.")
    chosen = _combined(item, list(found.values()))
    chosen[0].duration += time.monotonic() - began - sum(report.duration for report in chosen)
    shown = next((report for report in chosen if report.when == "call"), chosen[0])
    for task, text in results.outputs.items():
        if text:
            shown.sections.append((f"Captured output of {task}", text))
            if item.config.getoption("capture") == "no":
                sys.stdout.write(f"---- output of {task}\n{text}")
    return chosen


def failed(item: pytest.Item, text: str) -> list[pytest.TestReport]:
    """The reports of a test that failed, for a reason that the text says all about."""
    return [_report(item, "setup", "passed"), _report(item, "call", "failed", text)]


def _combined(item: pytest.Item, by_task: list[list[pytest.TestReport]]) -> list[pytest.TestReport]:
    """The reports of a task in which the test ran, or of one that skipped it as all did."""
    if not by_task:
        return failed(item, "no task has run the test: all were ended.")
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
    """For the pytest of a task."""
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

    def can_be_sent(value: Any) -> bool:
        try:
            pickle.dumps(value)
        except Exception:
            return False
        return True

    return {
        name: value
        for name, value in vars(config.option).items()
        if name not in _OF_THE_SESSION and can_be_sent(value)
    } | _OF_CHOICE


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
        raise SaidError(text)


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
            self.failed.append(report.longreprtext)
        to_data = self._config.hook.pytest_report_to_serializable
        there = supervisor()
        assert there is not None
        there.tell("report", to_data(config=self._config, report=report))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed.append(report.longreprtext)
