"""What all tests share: a clean environment, one TensorFlow with four CPUs, real clusters."""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from warm_programs import run_together

from tfdist_ext.launch import addresses_needed, plan_local, reserve_ports
from tfdist_ext.testing.tasks import in_task

collect_ignore = ["sample_project"]  # a project of its own: testing/test_sample_project.py
os.environ.pop("PYTEST_ADDOPTS", None)  # was for this pytest, and not for those that tests start
# Processes inherit ignored signals (nohup, a background job of a script), but no handlers: each
# process that a test starts has the default ones, and this pytest still outlives a hang-up.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
PROGRAMS = Path(__file__).parent / "programs"
OF_CLUSTERS = ("TF_CONFIG", "TPU_", "SLURM_", "OMPI_", "SM_", "JOB_COMPLETION_INDEX", "TFDIST_")


# Files of few tests that take long: were they the last, one core would wait for the other. Before
# them come folders of quick tests, which also get TensorFlow's files from the disk for all others.
QUICK = ("cluster", "launch", "data", "strategies")
LONG = (
    "test_exactness.py",
    "test_parameter_server.py",
    "test_sharded_workers.py",
    "test_parameter_server_exact.py",
    "test_configs.py",
    "test_workers.py",
    "test_memory_of_servers.py",
    "test_callbacks_in_cluster.py",
    "test_roles_of_tasks.py",
    "test_sample_project.py",
    "test_plugin.py",
    "test_new_strategy.py",
    "test_docs.py",
    "test_example_recommender.py",
    "test_example_sync_async.py",
    "test_example_image_classifier.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {name: place for place, name in enumerate((*QUICK, *LONG))}

    def place(item: pytest.Item) -> int:
        return places.get(item.path.parent.name, places.get(item.path.name, len(places)))

    items.sort(key=place)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees a cluster that it did not describe itself, or that its mark asks for."""
    if in_task.supervisor() is not None:
        return
    for name in os.environ:
        if name.startswith(OF_CLUSTERS):
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


@pytest.fixture(scope="session")
def run_workers(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[str]]:
    """Run a command as the workers of a real cluster; their logs, in the order of workers."""

    def run(command: list[str], *, workers: int = 2, timeout: float = 120) -> list[str]:
        folder = tmp_path_factory.mktemp("cluster")
        env = {name: v for name, v in os.environ.items() if not name.startswith(OF_CLUSTERS)}
        with reserve_ports(addresses_needed(workers=workers)) as ports:
            plan = plan_local(command, workers=workers, ports=ports, env=env)
            statuses, logs = run_together(plan, folder, env, timeout=timeout)
        assert list(statuses.values()) == [0] * workers, "\n".join(
            f"--- {name}: {statuses[name]}\n{log[-3000:]}" for name, log in logs.items()
        )
        return list(logs.values())

    return run


@pytest.fixture(scope="session")
def run_cluster(run_workers: Callable[..., list[str]]) -> Callable[..., list[Any]]:
    """Run a program of tests/programs as the workers of a real cluster.

    Returns what each worker printed last after "RESULT ", as JSON, in the order of workers.
    """

    def run(program: str, *args: str, **options: Any) -> list[Any]:
        logs = run_workers([sys.executable, str(PROGRAMS / program), *args], **options)
        return [json.loads(log.rsplit("RESULT ", 1)[1].splitlines()[0]) for log in logs]

    return run
