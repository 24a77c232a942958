"""Every shipped config trains the example to its accuracy, and plain Keras reads what it wrote."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tfdist_ext.launch import addresses_needed, plan_local, reserve_ports, run_plan

ROOT = Path(__file__).parents[1]
CONFIGS = sorted((ROOT / "configs").glob("*.toml"))


def test_there_are_configs() -> None:
    assert len(CONFIGS) >= 4


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.stem)
def test_config_trains(config: Path, tmp_path: Path) -> None:
    output, logs = tmp_path / "out", tmp_path / "logs"
    settings = tomllib.loads(config.read_text())
    workers = 2 if settings["strategy"]["name"] == "multi_worker_mirrored" else 1
    env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"}
    command = [sys.executable, "scripts/train.py", f"--config={config}", f"--output={output}"]
    if workers > 1:
        with (
            open(os.devnull, "w") as nowhere,
            reserve_ports(addresses_needed(workers=workers)) as ports,
        ):
            plan = plan_local(command, workers=workers, ports=ports, log_dir=str(logs), env=env)
            result = run_plan(plan, env=env, stream=nowhere, timeout=200)
        text = (logs / "worker-0.log").read_text()
        assert result.exit_status == 0, text[-3000:]
        assert "test accuracy" not in (logs / "worker-1.log").read_text()
        assert "Epoch" not in (logs / "worker-1.log").read_text()
    else:
        run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, timeout=200)
        text = run.stdout.decode()
        assert run.returncode == 0, run.stderr.decode()[-3000:]
    assert settings["strategy"]["name"] in text
    assert "test accuracy" in text

    check = [sys.executable, "scripts/check_saved_model.py", str(output)]
    run = subprocess.run(check, cwd=ROOT, env=env, capture_output=True, timeout=100, check=True)
    assert b"plain Keras loads" in run.stdout


def test_too_low_an_accuracy_fails(tmp_path: Path) -> None:
    command = [sys.executable, "scripts/train.py", "--epochs=1", f"--output={tmp_path}"]
    run = subprocess.run(
        [*command, "--config=configs/digits_one_device.toml"],
        cwd=ROOT, capture_output=True, timeout=100,
    )  # fmt: skip
    assert run.returncode != 0
    assert b"is under the 0.95 asked for" in run.stderr
