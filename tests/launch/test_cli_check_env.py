"""`tfdist check` and `tfdist env`, as processes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tfdist_ext.env_command import relevant_variables
from tfdist_ext.launch.ports import reserve_ports

pytestmark = pytest.mark.timeout(60)


def check(tfdist: Any, index: int, addresses: list[str], *options: str) -> Any:
    config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
    return tfdist("check", *options, TF_CONFIG=json.dumps(config))


def test_tasks_that_are_there(tfdist) -> None:
    with reserve_ports(2) as ports:
        addresses = [f"127.0.0.1:{port}" for port in ports]
        tasks = [check(tfdist, index, addresses) for index in (1, 0)]
        for task, index in zip(tasks, (1, 0), strict=True):
            out, err = task.communicate(timeout=30)
            assert (task.returncode, err) == (0, "")
            first, last = out.splitlines()
            assert first == f"worker:{index} of 2 tasks, from TF_CONFIG"
            assert last.startswith("all 2 tasks are ready, with the same cluster and python 3.")


def test_who_is_missing(tfdist) -> None:
    with reserve_ports(2) as ports:
        addresses = [f"127.0.0.1:{port}" for port in ports]
        alone = check(tfdist, 0, addresses, "--wait", "0.5")
        _, err = alone.communicate(timeout=30)
        assert alone.returncode == 1
        said = f"no answer from worker:1 ({addresses[1]}) within 0.5 s"
        assert err == f"tfdist check: worker:0: {said}\n"


def test_env_is_for_bug_reports(tfdist) -> None:
    task = tfdist("env", TF_CONFIG="", TFDIST_WANDB_TOKEN="hunter2")
    out, _ = task.communicate(timeout=50)
    assert task.returncode == 0
    for title in ("versions", "machine", "devices", "variables", 'create_strategy("auto")'):
        assert f"{title}\n" in out
    assert "  tensorflow 2." in out
    assert "  CPU:0\n" in out
    assert "TFDIST_WANDB_TOKEN=(hidden)" in out
    assert "hunter2" not in out
    assert "  default: one CPU on this machine, no cluster\n" in out


def test_variables_come_without_secrets() -> None:
    env = {
        "TF_CONFIG": '{"cluster": {}}',
        "NCCL_DEBUG": "INFO",
        "TFDIST_COMMAND": "tfdist run --workers 2 -- python train.py -u me:s3cret"
        " --db-pwd='a s3cret' --header 'Authorization: Bearer s3cret' --epochs 3",
        "TFDIST_PASSWORD": "s3cret",
        "GRPC_TRACE": "http://me:s3/cret@s3cret@proxy:80",
        "SM_HOSTS": '["--api-key","s3cret"]',
        "KERAS_HOME": "https://bucket/file?X-Amz-Signature=s3cret",
        "HOME": "/root",
        # Terraform uses these.
        "TF_CLI_CONFIG_FILE": "/root/.terraformrc",
        "TF_VAR_region": "us",
        "TF_LOG": "DEBUG",
        "MY_TF_CONFIG": "a",
    }
    lines = relevant_variables(env)
    assert "cret" not in "\n".join(lines)
    assert lines == [
        "GRPC_TRACE=(hidden)",
        "KERAS_HOME=(hidden)",
        "NCCL_DEBUG=INFO",
        "SM_HOSTS=(hidden)",
        "TFDIST_COMMAND=(hidden)",
        "TFDIST_PASSWORD=(hidden)",
        'TF_CONFIG={"cluster": {}}',
    ]
