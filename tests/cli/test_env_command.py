"""`tfdist env`: a text for bug reports, without secrets."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from warm_programs import run_program

from tfdist_ext.cli.env import relevant_variables


def test_env_prints_what_a_bug_report_needs(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tfdist_ext.cli", "env"]
    env = {**os.environ, "TF_CONFIG": "", "TFDIST_WANDB_TOKEN": "hunter2"}
    out = run_program(command, tmp_path, timeout=50, check=True, env=env).stdout
    for title in ("versions", "machine", "devices", "variables", 'create_strategy("auto")'):
        assert f"{title}\n" in out
    assert "  tensorflow 2." in out
    assert "  CPU:0\n" in out
    assert "TFDIST_WANDB_TOKEN=(hidden)" in out
    assert "hunter2" not in out
    assert "  default: one CPU on this machine, no cluster\n" in out


def test_env_hides_secrets() -> None:
    env = {
        "TF_CONFIG": '{"cluster": {}}',
        "NCCL_DEBUG": "INFO",
        "TFDIST_COMMAND": "tfdist run --workers 2 -- python train.py -u me:s3cret"
        " --db-pwd='a s3cret' --header 'Authorization: Bearer s3cret' --epochs 3",
        "TFDIST_PASSWORD": "s3cret",
        "KERAS_HOME": "https://bucket/file?X-Amz-Signature=s3cret",
        "HOME": "/root",
        "MY_TF_CONFIG": "a",
    }
    lines = relevant_variables(env)
    assert "cret" not in "\n".join(lines)
    assert lines == [
        "KERAS_HOME=(hidden)",
        "NCCL_DEBUG=INFO",
        "TFDIST_COMMAND=(hidden)",
        "TFDIST_PASSWORD=(hidden)",
        'TF_CONFIG={"cluster": {}}',
    ]
