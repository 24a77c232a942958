"""A script as the function of a Ray Train run of two workers; writes what Ray knows at its end.

Arguments: a folder, then the script and its arguments.
"""

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import ray
import ray.train
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.tensorflow import TensorflowTrainer


def train(config: dict[str, Any]) -> None:
    rank = ray.train.get_context().get_world_rank()
    Path(config["folder"], f"pid-{rank}").write_text(str(os.getpid()))
    sys.argv = config["command"]
    runpy.run_path(sys.argv[0], run_name="__main__")


def main(folder: Path, command: list[str]) -> None:
    context = ray.init(num_cpus=4, include_dashboard=False)
    (folder / "session").write_text(context.address_info["session_dir"])
    trainer = TensorflowTrainer(
        train,
        train_loop_config={"folder": str(folder), "command": command},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name="run", storage_path=str(folder), failure_config=FailureConfig(max_failures=2)
        ),
    )
    result = trainer.fit()
    known = {
        "reported": [metrics for _, metrics in result.best_checkpoints],
        "checkpoint": result.checkpoint.path,
    }
    (folder / "result.json").write_text(json.dumps(known))
    ray.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
