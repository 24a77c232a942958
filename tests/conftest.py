"""What all tests share: a clean environment, and one TensorFlow with four CPUs."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from task_programs import CLUSTERS

from tfdist_ext.testing.tasks import in_task

collect_ignore = ["sample_project"]  # a project of its own: testing/test_sample_project.py
os.environ.pop("PYTEST_ADDOPTS", None)  # was for this pytest, and not for those that tests start
# Processes inherit ignored signals (nohup, a background job of a script), but no handlers: each
# process that a test starts has the default ones, and this pytest still outlives a hang-up.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Files of few tests that take long: were they the last, one core would wait for the other. Before
# them come folders of quick tests, which also get TensorFlow's files from the disk for all others.
QUICK = ("cluster", "launch", "data", "strategies")
LONG = (
    "test_docs.py",
    "test_parameter_server.py",
    "test_preemption.py",
    "test_one_trace.py",
    "test_stalls.py",
    "test_exactness.py",
    "test_workers.py",
    "test_exact_steps.py",
    "test_checkpoints.py",
    "test_plugin.py",
    "test_barriers.py",
    "test_sharded_workers.py",
    "test_parameter_server_exact.py",
    "test_callbacks_in_cluster.py",
    "test_frozen_tasks.py",
    "test_sample_project.py",
    "test_configs.py",
    "test_keras_hub.py",
    "test_memory_of_servers.py",
    "test_roles_of_tasks.py",
    "test_example_image_classifier.py",
    "test_example_recommender.py",
    "test_example_sync_async.py",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run the tests marked `long`, too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    places = {name: place for place, name in enumerate((*QUICK, *LONG))}

    def place(item: pytest.Item) -> int:
        return places.get(item.path.parent.name, places.get(item.path.name, len(places)))

    items.sort(key=place)
    if not is_everything_run(config):
        check_words_of_long(items)
        long = [item for item in items if is_long(item)]
        items[:] = [item for item in items if not is_long(item)]
        config.hook.pytest_deselected(items=long)
        config.stash[DESELECTED] = len(long)
        if hasattr(config, "workeroutput"):
            config.workeroutput["deselected_long"] = len(long)


DESELECTED = pytest.StashKey[int]()


def is_everything_run(config: pytest.Config) -> bool:
    """With --long, for a test that is named, and in a task, which runs the one test it is for."""
    named = any("::" in argument for argument in config.args)
    return config.getoption("--long") or named or in_task.supervisor() is not None


def is_long(item: pytest.Item) -> bool:
    """Whether a `long` mark is for this test: with words, for names that contain one of them."""
    marks = item.iter_markers("long")
    return any(not m.args or any(word in item.name for word in m.args) for m in marks)


def check_words_of_long(items: list[pytest.Item]) -> None:
    """Each word of a `long` mark is in the name of a test: a case that is renamed stays marked."""
    found: dict[int, tuple[pytest.Item, set[str]]] = {}
    for item in items:
        for mark in item.iter_markers("long"):
            _, unused = found.setdefault(id(mark), (item, set(mark.args)))
            unused -= {word for word in mark.args if word in item.name}
    for item, unused in found.values():
        if unused:
            raise pytest.UsageError(f"{item.nodeid}: no case of it has {unused} in its name")


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Of pytest-xdist: each worker collects all tests."""
    if "deselected_long" in getattr(node, "workeroutput", ()):
        node.config.stash[DESELECTED] = node.workeroutput["deselected_long"]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if count := config.stash.get(DESELECTED, 0):
        terminalreporter.write_line(f"{count} long tests were not run: scripts/test --long")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees a cluster that it did not describe itself, or that its mark asks for."""
    if in_task.supervisor() is not None:
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
def four_cpus() -> None:
    """TensorFlow in this process, with four logical CPUs: fixed once it has started.

    In a task of a cluster the test starts it, by its strategy.
    """
    if in_task.supervisor() is not None:
        return
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 4)
    assert len(tf.config.list_logical_devices("CPU")) == 4
