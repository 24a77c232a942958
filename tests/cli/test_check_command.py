"""`tfdist check`, as a process."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tfdist_ext.launcher.resources import reserve_ports

pytestmark = pytest.mark.timeout(60)


def check(tfdist: Any, index: int, addresses: list[str], *options: str) -> Any:
    config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
    return tfdist("check", *options, TF_CONFIG=json.dumps(config))


def test_check_succeeds_when_all_tasks_are_there(tfdist) -> None:
    with reserve_ports(2) as ports:
        addresses = [f"127.0.0.1:{port}" for port in ports]
        tasks = [check(tfdist, index, addresses) for index in (1, 0)]
        for task, index in zip(tasks, (1, 0), strict=True):
            out, err = task.communicate(timeout=30)
            assert (task.returncode, err) == (0, "")
            first, last = out.splitlines()
            assert first == f"worker:{index} of 2 tasks, from TF_CONFIG"
            assert last.startswith("all 2 tasks are ready, with the same cluster and python 3.")


def test_check_names_the_missing_task(tfdist) -> None:
    with reserve_ports(2) as ports:
        addresses = [f"127.0.0.1:{port}" for port in ports]
        alone = check(tfdist, 0, addresses, "--wait", "0.5")
        _, err = alone.communicate(timeout=30)
        assert alone.returncode == 1
        said = f"no answer from worker:1 ({addresses[1]}) within 0.5 s"
        assert err == f"tfdist check: worker:0: {said}\n"
