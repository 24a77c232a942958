"""The example ray_train, then a run that loses a node, on a Ray cluster of two nodes.

When the file "lose" appears in the folder, the node beside the head is lost. Writes what Ray and
one device know at the end.

Arguments: a folder, then a script and its arguments, which each worker of the second run runs.
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
import ray_train as example
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
    """Wait for the file, and end the node."""
    while not (folder / "lose").exists():
        time.sleep(0.1)
    (node,) = cluster.worker_nodes
    cluster.remove_node(node, allow_graceful=False)


def run(folder: Path, command: list[str]) -> dict[str, Any]:
    """The run that loses a node; what Ray knows at its end."""
    context = ray.init()
    (folder / "session").write_text(context.address_info["session_dir"])
    trainer = TensorflowTrainer(
        train,
        train_loop_config={"folder": str(folder), "command": command},
        scaling_config=ScalingConfig(num_workers=2, placement_strategy="SPREAD"),
        run_config=RunConfig(
            name="run", storage_path=str(folder), failure_config=FailureConfig(max_failures=2)
        ),
    )
    result = trainer.fit()
    ray.shutdown()
    return {
        "reported": [metrics for _, metrics in result.best_checkpoints],
        "checkpoint": result.checkpoint.path,
    }


def on_one_device() -> list[float]:
    """The losses at the end of both trainings of the example."""
    import tfdist_ext as tfd

    def train(model: Any, seed: int, first: int, epochs: int) -> float:
        data = tfd.data.from_arrays(example.examples(), global_batch_size=example.BATCH, seed=seed)
        return model.fit(data, initial_epoch=first, epochs=epochs, verbose=0).history["loss"][-1]

    strategy = tfd.create_strategy("default")
    model, further = (tfd.distribute(example.build, strategy) for _ in range(2))
    losses = [train(model, 7, 0, 3)]
    model.save_checkpoint("checkpoint.safetensors")
    further.restore_checkpoint("checkpoint.safetensors")
    return [*losses, train(further, 8, 3, 5)]


def main(folder: Path, command: list[str]) -> None:
    # Each node could have both workers.
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False}
    )
    cluster.add_node(num_cpus=2)
    os.environ["RAY_ADDRESS"] = cluster.address
    threading.Thread(target=lose_a_node, args=(cluster, folder), daemon=True).start()
    try:
        example.main(folder / "storage")
        known = run(folder, command)
    finally:
        cluster.shutdown()
    del os.environ["RAY_ADDRESS"]
    (folder / "result.json").write_text(json.dumps({**known, "one device": on_one_device()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
