"""Tests in processes of their own: what is reported of tests that pass, fail and hang."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from processes import check_dead
from task_programs import LEFT_OUT

PROJECT = '''
import os
import json
import subprocess
import time
import unittest

import pytest

import tfdist_ext as tfd

CHILDREN = []


@pytest.fixture
def prepared(tmp_path):
    return tmp_path


@pytest.mark.tfdist_cluster(worker=2)
def test_one_fails(tfdist_cluster):
    print("hello from", tfdist_cluster.task.index)
    wanted = [1, 2]
    assert tfdist_cluster.task.index == 0 or wanted == [1, 3]
    time.sleep(100)


@pytest.mark.tfdist_cluster(worker=2, timeout=12)
def test_hangs(tfdist_cluster):
    tfd.create_strategy()  # has a timer of its own
    time.sleep(100)


@pytest.mark.tfdist_cluster(worker=2)
def test_killed(tfdist_cluster):
    """A task that was killed runs the test once, and does not fail it."""
    folder = os.environ["SHARED_FOLDER"]
    begun = os.path.join(folder, "begun")
    if tfdist_cluster.task.index == 0:
        while not os.path.exists(begun):
            time.sleep(0.01)
        tfdist_cluster.kill("worker", 1)
        for index, message in ((7, "there is no task worker:7"), (0, "cannot kill itself")):
            with pytest.raises(Exception, match=message):
                tfdist_cluster.kill("worker", index)
    else:
        open(begun, "x").close()
        time.sleep(100)


@pytest.mark.tfdist_cluster(worker=2)
def test_xfails(tfdist_cluster, pytestconfig):
    assert pytestconfig.getoption("--report-log") is None, "a file of the session"
    if tfdist_cluster.task.index == 1:
        pytest.xfail("a known fault")
    time.sleep(100)


@pytest.mark.xfail(raises=ZeroDivisionError)
@pytest.mark.tfdist_cluster(worker=2)
@pytest.mark.parametrize("error", [ZeroDivisionError, KeyError, None])
def test_expects_an_error(tfdist_cluster, error):
    if error is not None and tfdist_cluster.task.index == 1:
        raise error
    time.sleep(100 if error else 0)


@pytest.mark.slow
@pytest.mark.tfdist_cluster(worker=1, ps=1)
@pytest.mark.parametrize("offset", [1.0])
def test_passes(tfdist_cluster, request, offset, prepared):
    assert set(tfdist_cluster.config.jobs) == {"chief", "worker", "ps"}
    assert request.config.getoption("--width") == 5
    print("seen by", tfdist_cluster.task)
    CHILDREN.append(subprocess.Popen(["sleep", "600"]))
    file = f"{CHILDREN[-1].pid}.child"
    open(os.path.join(os.environ["SHARED_FOLDER"], file), "w").close()


@pytest.mark.tfdist_cluster(worker=2)
class TestMethods(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = os.environ["SHARED_FOLDER"]

    def setUp(self):
        self.task = json.loads(os.environ["TF_CONFIG"])["task"]["index"]

    def test_method(self):
        open(os.path.join(self.folder, f"method-{self.task}"), "w").close()

    def test_method_fails(self):
        self.assertEqual(self.task, 0)


@pytest.mark.parametrize("tfdist_strategy", ["mirrored_4"], indirect=True)
def test_a_strategy_of_its_own(tfdist_strategy):
    import tensorflow as tf

    with tfdist_strategy.scope():
        variable = tf.Variable(1.0)
    each = tfdist_strategy.run(lambda: variable + 1.0)
    assert float(tfdist_strategy.reduce("SUM", each, axis=None)) == 8.0


@pytest.mark.tfdist_cluster(worker=3)
@pytest.mark.parametrize("tfdist_strategy", ["multi_worker_2"], indirect=True)
def test_a_strategy_of_another_cluster(tfdist_strategy):
    pass
'''

CONFTEST = """
def pytest_addoption(parser):
    parser.addoption("--width", type=int, default=4)
    parser.addoption("--report-log")
"""
OUTCOMES = {
    "test_passes[1.0]": "PASSED",
    "test_one_fails": "FAILED",
    "test_hangs": "FAILED",
    "test_killed": "PASSED",
    "test_xfails": "XFAIL",
    "test_expects_an_error[ZeroDivisionError]": "XFAIL",
    "test_expects_an_error[KeyError]": "FAILED",
    "test_expects_an_error[None]": "XPASS",
    "TestMethods::test_method": "PASSED",
    "TestMethods::test_method_fails": "FAILED",
    "test_a_strategy_of_its_own[mirrored_4]": "PASSED",
    "test_a_strategy_of_another_cluster[multi_worker_2]": "ERROR",
}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, shared: Path) -> str:
    """What a pytest on the project prints."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "test_it.py").write_text(PROJECT)
    (folder / "conftest.py").write_text(CONFTEST)
    # Some are of pytest's own plugins, and some are overruled on the command line.
    options = "--strict-markers -W error -ra --verbosity=0 --ff -m 'not slow'"
    (folder / "pytest.ini").write_text(f"[pytest]\naddopts = {options}\nmarkers = slow\n")
    command = [sys.executable, "-m", "pytest", "-vv", "-rA", "-m", ""]
    command += ["--width", "5", "--report-log", "log"]
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": LEFT_OUT, "SHARED_FOLDER": str(shared)},
        capture_output=True,
        text=True,
        timeout=250,
    )
    return done.stdout + done.stderr


def section(run: str, test: str) -> str:
    """What is said of a test that failed."""
    found = re.search(rf"^_+ {re.escape(test)} _+\n(.*?)^(?:_{{5}}|={{5}})", run, re.M | re.S)
    assert found, run
    return found[1]


def test_outcomes_are_those_of_the_tasks(run: str) -> None:
    pattern = r"^(PASSED|FAILED|ERROR|XFAIL|XPASS) test_it\.py::(\S+)"
    found = {name: outcome for outcome, name in re.findall(pattern, run, re.M)}
    assert found == OUTCOMES, run


def test_failure_names_the_task_and_shows_the_values(run: str) -> None:
    assert re.search(r"^FAILED test_it\.py::test_one_fails - Failed: worker:1: .*assert", run, re.M)
    text = section(run, "test_one_fails")
    assert re.search(r"^worker:1: AssertionError: .*\n\ntfdist_cluster = <", text, re.M)
    assert "At index 1 diff: 2 != 3" in text
    assert re.search(r"Captured output of worker:0 call -*\nhello from 0\n", text)


def test_methods_of_a_unittest_test_case_run_in_the_cluster(run: str, shared: Path) -> None:
    assert {file.name for file in shared.glob("method-*")} == {"method-0", "method-1"}
    assert "worker:1: AssertionError: 1 != 0" in section(run, "TestMethods.test_method_fails")


def test_timeout_shows_the_stack_of_each_task(run: str) -> None:
    text = section(run, "test_hangs")
    assert "worker:0, worker:1 had not ended after 12 s" in text
    assert text.count("in test_hangs") == 2


def test_output_of_passed_tests_is_kept(run: str) -> None:
    for task in ("chief:0", "worker:0", "ps:0"):
        pattern = rf"Captured output of {task} call -*\n(?:.*\n)*?seen by {task}"
        assert re.search(pattern, run), run


def test_passed_test_leaves_no_process(run: str, shared: Path) -> None:
    children = [int(file.stem) for file in shared.glob("*.child")]
    assert len(children) == 3
    check_dead(children)


def test_strategy_that_contradicts_the_mark_is_an_error(run: str) -> None:
    text = section(run, "ERROR at setup of test_a_strategy_of_another_cluster[multi_worker_2]")
    assert "Traceback" not in text
    assert text.endswith(
        "the mark of the test asks for {'worker': 3}, but its strategy multi_worker_2 has 2"
        " workers. Remove the mark or the strategy.\n"
    )
