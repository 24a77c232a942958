"""A script as the function of a Ray Train run of two workers; writes what Ray knows at its end.

Each worker has a node of its own. When the file "lose" appears in the folder, the node of the last
worker is lost. A third node has no worker until then.

Arguments: a folder, then the script and its arguments.
"""

import json
import os
import runpy
import sys
import threading
import time
from pathlib import Path
from typing import Any

import ray
import ray.train
from ray.cluster_utils import Cluster
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.tensorflow import TensorflowTrainer


def train(config: dict[str, Any]) -> None:
    context = ray.train.get_context()
    rank, node = context.get_world_rank(), ray.get_runtime_context().get_node_id()
    Path(config["folder"], f"worker-{rank}").write_text(f"{os.getpid()} {node}")
    sys.argv = config["command"]
    runpy.run_path(sys.argv[0], run_name="__main__")


def lose_a_node(cluster: Cluster, folder: Path) -> None:
    """Wait for the file, and end the node of worker 1."""
    while not (folder / "lose").exists():
        time.sleep(0.1)
    _, lost = (folder / "worker-1").read_text().split()
    (node,) = (each for each in cluster.list_all_nodes() if each.node_id == lost)
    cluster.remove_node(node, allow_graceful=False)


def main(folder: Path, command: list[str]) -> None:
    # The driver's node has no CPU for workers, and each of the others has one.
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    for _ in range(3):
        cluster.add_node(num_cpus=1)
    context = ray.init(address=cluster.address)
    (folder / "session").write_text(context.address_info["session_dir"])
    threading.Thread(target=lose_a_node, args=(cluster, folder), daemon=True).start()
    trainer = TensorflowTrainer(
        train,
        train_loop_config={"folder": str(folder), "command": command},
        scaling_config=ScalingConfig(
            num_workers=2,
            resources_per_worker={"CPU": 1},
            placement_strategy="SPREAD",
        ),
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
    cluster.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
