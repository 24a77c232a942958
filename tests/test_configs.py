"""Every shipped config trains the example to its accuracy, and plain Keras reads what it wrote."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from warm_programs import run_cluster, run_program

ROOT = Path(__file__).parents[1]
CONFIGS = sorted((ROOT / "configs").glob("*.toml"))


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("outputs")


@pytest.mark.long("central_storage", "mirrored", "one_device", "parameter_server")
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.stem)
def test_config_trains(config: Path, outputs: Path, tmp_path: Path) -> None:
    output = outputs / config.stem
    settings = tomllib.loads(config.read_text())
    train = str(ROOT / "docs" / "examples" / "digits.py")
    command = [sys.executable, train, f"--config={config}", f"--output={output}"]
    command.append("--epochs=8")  # enough for the accuracy asked for
    if settings["strategy"]["name"] == "multi_worker_mirrored":
        text, silent = run_cluster(command, tmp_path, timeout=200, workers=2).values()
        assert "test accuracy" not in silent
        assert "Epoch" not in silent
    elif settings["strategy"]["name"] == "parameter_server":
        logs = run_cluster(command, tmp_path, timeout=200, workers=2, ps=2)
        text, *servers = logs.values()
        for log in servers:  # each has ended by itself, with 0
            assert log.endswith("is done\n")
    else:
        run = run_program(command, tmp_path, cwd=ROOT, timeout=200)
        text = run.stdout
        assert run.returncode == 0, run.stderr[-3000:]
    assert settings["strategy"]["name"] in text
    assert "test accuracy" in text
    result = json.loads((output / "result.json").read_text())
    assert result["test_accuracy"] >= settings["training"]["minimum_accuracy"]


def test_plain_keras_loads_models_of_configs(outputs: Path) -> None:
    """Of all tests above: one Python reads what each has written."""
    written = sorted(map(str, outputs.iterdir()))
    env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"}
    check = [sys.executable, "docs/examples/check_saved_model.py", *written]
    # In a Python that has not imported tfdist_ext, which the script asserts.
    run = subprocess.run(check, cwd=ROOT, env=env, capture_output=True, timeout=100, check=True)
    assert run.stdout.count(b"plain Keras loads") == len(written) >= 1
