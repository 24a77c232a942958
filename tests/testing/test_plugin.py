"""The pytest plugin, in a pytest of its own: what it reports of tests that pass, fail and hang."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from task_bodies import is_alive

from tfdist_ext.errors import StrategyError
from tfdist_ext.testing import plugin
from tfdist_ext.testing.matrix import case_of

PROJECT = '''
import os
import subprocess
import time

import pytest

CHILDREN = []


@pytest.fixture
def prepared(tmp_path):
    return tmp_path


@pytest.fixture
def slow_end():
    yield "value"
    time.sleep(3)


@pytest.mark.cluster(worker=2)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_sum(cluster, offset, prepared):
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    mine = tf.constant(float(cluster.task.index) + offset)
    add = lambda: tf.distribute.get_replica_context().all_reduce("SUM", mine)
    assert float(strategy.run(add)) == 1.0 + 2 * offset


@pytest.mark.cluster(worker=2)
def test_one_fails(cluster):
    print("hello from", cluster.task.index)
    wanted = [1, 2]
    assert cluster.task.index == 0 or wanted == [1, 3]
    time.sleep(100)


@pytest.mark.cluster(worker=2, timeout=12)
def test_hangs(cluster):
    time.sleep(100)


@pytest.mark.cluster(worker=2)
def test_skipped(cluster):
    pytest.skip("not here")


@pytest.mark.xfail(strict=True)
@pytest.mark.cluster(worker=2)
def test_fails_as_expected(cluster):
    assert cluster.task.index == 5


@pytest.mark.cluster(worker=2)
def test_a_fixture_is_missing(cluster, absent):
    pass


@pytest.mark.cluster(worker=3)
def test_killed_and_started_again(cluster):
    """The first task ends the others, and starts one again, which then has its second attempt."""
    folder = os.environ["SHARED_FOLDER"]
    here = os.path.join(folder, f"{cluster.task.index}-{cluster.attempt}")
    open(here, "w").close()
    if cluster.task.index == 0:
        while not os.path.exists(os.path.join(folder, "2-0")):
            time.sleep(0.01)
        cluster.kill("worker", 1)
        cluster.restart("worker", 2)
        while not os.path.exists(os.path.join(folder, "2-1")):
            time.sleep(0.01)
        assert {"2-0", "2-1"} <= {*os.listdir(folder)}
        with pytest.raises(Exception, match="there is no task worker:7"):
            cluster.kill("worker", 7)
    elif not cluster.attempt:
        time.sleep(100)


@pytest.mark.cluster(worker=1, ps=1)
def test_with_servers(cluster):
    import tfdist_ext as tfd

    assert set(cluster.config.jobs) == {"chief", "worker", "ps"}
    tfd.run(lambda: tfd.create_strategy())


@pytest.mark.slow
@pytest.mark.cluster(worker=2)
def test_options_of_the_command_line(cluster, request):
    assert request.config.getoption("--width") == 5
    print("seen by", cluster.task)


@pytest.mark.cluster(worker=2)
def test_failed_before_it_was_killed(cluster, slow_end):
    sign = os.path.join(os.environ["SHARED_FOLDER"], "failing")
    if cluster.task.index == 1:
        open(sign, "w").close()
        assert slow_end == "never"
    while not os.path.exists(sign):
        time.sleep(0.01)
    time.sleep(1)
    cluster.kill("worker", 1)


@pytest.mark.cluster(worker=2)
def test_of_its_own_end(cluster):
    with pytest.raises(Exception, match="cannot kill itself"):
        cluster.kill(cluster.task.type, cluster.task.index)


@pytest.mark.cluster(worker=2)
def test_leaves_processes(cluster):
    for apart in (False, True):
        CHILDREN.append(subprocess.Popen(["sleep", "600"], start_new_session=apart))
        file = f"{CHILDREN[-1].pid}.child"
        open(os.path.join(os.environ["SHARED_FOLDER"], file), "w").close()


@pytest.mark.cluster(worker=2)
def test_one_leaves(cluster):
    if cluster.task.index == 1:
        pytest.exit("enough", returncode=0)


@pytest.mark.cluster(worker=2, timeout=None)
def test_a_wrong_limit():
    pass


@pytest.mark.logical_cpus(3)
def test_three():
    import tensorflow as tf

    assert len(tf.config.list_logical_devices("CPU")) == 3


@pytest.mark.logical_cpus(2)
def test_two_in_a_process_of_its_own(prepared):
    import tensorflow as tf

    assert len(tf.config.list_logical_devices("CPU")) == 2


def test_strategy(strategy):
    import tensorflow as tf

    with strategy.scope():
        variable = tf.Variable(1.0)
    total = strategy.reduce("SUM", strategy.run(lambda: variable + 1.0), axis=None)
    assert float(total) == 2.0 * strategy.num_replicas_in_sync


@pytest.mark.cluster(2)
def test_a_wrong_mark():
    pass


def test_cluster_without_a_mark(cluster):
    pass
'''

CONFTEST = """
def pytest_addoption(parser):
    parser.addoption("--width", type=int, default=4)
"""
OUTCOMES = {
    "test_sum[0.0]": "PASSED",
    "test_sum[1.0]": "PASSED",
    "test_one_fails": "FAILED",
    "test_hangs": "FAILED",
    "test_skipped": "SKIPPED",
    "test_fails_as_expected": "XFAIL",
    "test_a_fixture_is_missing": "FAILED",
    "test_killed_and_started_again": "PASSED",
    "test_with_servers": "PASSED",
    "test_options_of_the_command_line": "PASSED",
    "test_failed_before_it_was_killed": "FAILED",
    "test_of_its_own_end": "PASSED",
    "test_leaves_processes": "PASSED",
    "test_one_leaves": "FAILED",
    "test_a_wrong_limit": "FAILED",
    "test_three": "PASSED",
    "test_two_in_a_process_of_its_own": "PASSED",
    "test_strategy[mirrored_2]": "PASSED",
    "test_strategy[placed_3]": "PASSED",
    "test_strategy[mwms_2]": "PASSED",
    "test_a_wrong_mark": "FAILED",
    "test_cluster_without_a_mark": "ERROR",
}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, shared: Path) -> str:
    """What a pytest on the project prints, under xdist; the sample project's runs without it."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "test_it.py").write_text(PROJECT)
    (folder / "conftest.py").write_text(CONFTEST)
    # Some are of pytest's own plugins, and some are overruled on the command line.
    options = "--strict-markers -W error -ra --verbosity=0 --ff -m 'not slow'"
    (folder / "pytest.ini").write_text(f"[pytest]\naddopts = {options}\nmarkers = slow\n")
    command = [sys.executable, "-m", "pytest", "-vv", "-rA", "-m", "", "--width", "5"]
    command += ["--tfdist-strategies=mirrored_2,placed_3,mwms_2", "-n", "2"]
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "SHARED_FOLDER": str(shared)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    return done.stdout + done.stderr


def section(run: str, test: str) -> str:
    """What is said of a test that failed."""
    found = re.search(rf"^_+ {re.escape(test)} _+\n(.*?)^(?:_{{5}}|={{5}})", run, re.M | re.S)
    assert found, run
    return found[1]


def test_outcomes(run: str) -> None:
    pattern = r"^(PASSED|FAILED|ERROR|XFAIL) test_it\.py::(\S+)"
    found = {name: outcome for outcome, name in re.findall(pattern, run, re.M)}
    wanted = {name: outcome for name, outcome in OUTCOMES.items() if outcome != "SKIPPED"}
    assert found == wanted, run
    assert re.search(r"^SKIPPED \[1\] test_it\.py:\d+: not here$", run, re.M)


def test_a_failure_names_the_task_and_shows_the_values(run: str) -> None:
    text = section(run, "test_one_fails")
    assert re.search(r"^worker:1: cluster = ", text, re.M)
    assert "At index 1 diff: 2 != 3" in text
    assert "---- output of worker:0\nhello from 0\n" in text


def test_a_hang_shows_where_each_task_is(run: str) -> None:
    text = section(run, "test_hangs")
    assert "worker:0: had not ended after 12 s" in text
    assert text.count("in test_hangs") == 2
    assert "_pytest" not in text


def test_an_output_is_kept_of_what_passes(run: str) -> None:
    for index in (0, 1):
        pattern = rf"Captured output of worker:{index} -*\n(?:.*\n)*?seen by worker:{index}"
        assert re.search(pattern, run), run


def test_no_process_is_left_of_what_passes(run: str, shared: Path) -> None:
    children = [int(file.stem) for file in shared.glob("*.child")]
    assert len(children) == 4
    deadline = time.monotonic() + 5
    while any(map(is_alive, children)):
        assert time.monotonic() < deadline, "processes are left"
        time.sleep(0.05)


def test_a_mark_and_a_strategy_that_disagree_are_an_error() -> None:
    class Item:
        callspec = SimpleNamespace(params={"strategy": case_of("mwms_2")})
        get_closest_marker = {"cluster": pytest.mark.cluster(worker=3).mark}.get

    with pytest.raises(StrategyError, match="its strategy is mwms_2, which has 2 workers"):
        plugin._own_processes(Item())


def test_mistakes_are_named(run: str) -> None:
    assert "worker:1: cluster = " in section(run, "test_failed_before_it_was_killed")
    assert "worker:1 ended before the test did" in section(run, "test_one_leaves")
    assert "seconds above 0; None arrived" in section(run, "test_a_wrong_limit")
    assert "fixture 'absent' not found" in section(run, "test_a_fixture_is_missing")
    assert "@pytest.mark.cluster(worker=2, ps=1)" in section(run, "test_a_wrong_mark")
    assert "is for tests marked with @pytest.mark.cluster" in run
