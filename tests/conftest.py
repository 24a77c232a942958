"""What all tests share: a clean environment, and one TensorFlow with four CPUs."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from task_programs import CLUSTERS

collect_ignore = ["sample_project"]  # a project of its own: testing/test_sample_project.py
os.environ.pop("PYTEST_ADDOPTS", None)  # was for this pytest, and not for those that tests start
# Processes inherit ignored signals (nohup, a background job of a script), but no handlers: each
# process that a test starts has the default ones, and this pytest still outlives a hang-up.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Files that take long run first, so that all cores are busy to the end.
LONG_ROOMS = ("training", "testing", "examples", "test_docs.py", "strategies")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run the tests marked `long`, too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        room = item.path.relative_to(Path(__file__).parent).parts[0]
        return LONG_ROOMS.index(room) if room in LONG_ROOMS else len(LONG_ROOMS)

    items.sort(key=place)
    if not is_everything_run(config):
        long = [item for item in items if is_long(item)]
        items[:] = [item for item in items if not is_long(item)]
        config.hook.pytest_deselected(items=long)


def is_everything_run(config: pytest.Config) -> bool:
    """With --long, and for a test that is named, as in a task, which runs the one it is for."""
    named = any("::" in argument for argument in config.args)
    return config.getoption("--long") or named


def is_task(config: pytest.Config) -> bool:
    """Whether this pytest runs one test in a task of a cluster."""
    return config.getoption("tfdist_folder", None) is not None


def is_long(item: pytest.Item) -> bool:
    """Whether a `long` mark is for this test: with words, for names that contain one of them."""
    marks = item.iter_markers("long")
    return any(not m.args or any(word in item.name for word in m.args) for m in marks)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if not is_everything_run(config) and not is_task(config):
        terminalreporter.write_line("Tests marked `long` were not run: scripts/test --long")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config) -> None:
    """No test sees a cluster that it did not describe itself, or that its mark asks for."""
    if is_task(pytestconfig):
        return
    for name in os.environ:
        if name.startswith(CLUSTERS):
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True, scope="module")
def quick_garbage_collection() -> Iterator[None]:
    """What a module leaves behind is looked through once, not in each collection from then on."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def four_cpus(pytestconfig: pytest.Config) -> None:
    """TensorFlow in this process, with four logical CPUs: fixed once it has started.

    In a task of a cluster the test starts it, by its strategy.
    """
    if is_task(pytestconfig):
        return
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 4)
    assert len(tf.config.list_logical_devices("CPU")) == 4
