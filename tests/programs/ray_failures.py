"""Runs of Ray Train of two workers that fail, each in its way; writes what Ray reports of them.

Arguments: a folder, and the names of the runs.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import ray
import ray.train
from ray.train import RunConfig, ScalingConfig
from ray.train.tensorflow import TensorflowTrainer


def train(config: dict[str, Any]) -> None:
    import keras
    import mlp

    import tfdist_ext as tfd

    strategy = tfd.create_strategy()
    name = config["name"]
    last = ray.train.get_context().get_world_rank() == 1

    class InSecondEpoch(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
            if last and epoch == 1 and name == "raises":
                raise ValueError("no such file: data.tfrecord")
            if last and epoch == 1 and name == "terminated":
                os.kill(os.getpid(), signal.SIGTERM)

    model = tfd.distribute(mlp.build, strategy)
    callbacks = [InSecondEpoch(), tfd.ray.ReportCallback()]
    options = {"batch_size": mlp.BATCH, "epochs": 3, "verbose": 0, "callbacks": callbacks}
    model.fit(*mlp.data(), **options)
    if not (last and name == "leaves"):
        model.fit(*mlp.data(), **options)


def main(folder: Path, names: list[str]) -> None:
    ray.init(num_cpus=4, include_dashboard=False)
    errors = {}
    for name in names:
        trainer = TensorflowTrainer(
            train,
            train_loop_config={"name": name},
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(name=name, storage_path=str(folder)),
        )
        try:
            trainer.fit()
        except ray.train.WorkerGroupError as error:
            errors[name] = {rank: repr(each) for rank, each in error.worker_failures.items()}
    (folder / "errors.json").write_text(json.dumps(errors))
    ray.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
