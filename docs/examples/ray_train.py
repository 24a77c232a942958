"""Trains on two Ray workers, restarts after a failure, and reports metrics and checkpoints.

    pip install "ray[train]"
    python docs/examples/ray_train.py

Without tfdist_ext, Keras 3's `fit` crashes in the function of a TensorflowTrainer.
"""

import os
import sys
from pathlib import Path

import ray
import ray.data
import ray.train
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.tensorflow import TensorflowTrainer

# Keras and TensorFlow are imported by the workers, after Ray has set TF_CONFIG.

ROWS, BATCH = 512, 64  # all examples, and the global batch size


def build():
    import keras

    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [keras.Input([8]), keras.layers.Dense(16, "tanh"), keras.layers.Dense(1)]
    )
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return model


def examples():
    import numpy as np

    x = np.random.default_rng(0).normal(size=(ROWS, 8)).astype("float32")
    return x, x.sum(axis=1, keepdims=True)


def train(config):
    """Trains on each worker, with the numbers of one device."""
    import tfdist_ext as tfd

    strategy = tfd.create_strategy()  # from the TF_CONFIG that Ray has set
    data = tfd.data.from_arrays(examples(), global_batch_size=BATCH, seed=7)
    model = tfd.distribute(build, strategy)
    model.fit(
        data,
        epochs=config["epochs"],
        verbose=2,
        callbacks=[tfd.ray.ReportCallback()],
        checkpoint_dir=Path(config["folder"], "fit"),
    )
    model.save(Path(config["folder"], "model.keras"))  # the chief writes


def train_on_shards(config):
    """Trains on a Ray dataset. Each worker reads its own shard.

    Which examples share a batch depends on the number of workers.
    """
    import tfdist_ext as tfd

    strategy = tfd.create_strategy()
    mine = ray.train.get_dataset_shard("train")
    rows = config["batch"] // strategy.num_replicas_in_sync

    def read(shard):
        return mine.to_tf("x", "y", batch_size=rows)

    model = tfd.distribute(build, strategy)
    model.fit(
        tfd.data.from_dataset_fn(read),
        epochs=config["epochs"],
        verbose=2,
        callbacks=[tfd.ray.ReportCallback()],
        checkpoint_dir=Path(config["folder"], "fit"),
    )


def train_further(config):
    """Trains from the weights and the optimizer state of a Ray checkpoint."""
    import tfdist_ext as tfd

    model = tfd.distribute(build, tfd.create_strategy())
    with config["checkpoint"].as_directory() as folder:
        before = model.restore_checkpoint(Path(folder, tfd.ray.CHECKPOINT))
    model.fit(
        tfd.data.from_arrays(examples(), global_batch_size=BATCH, seed=8),
        initial_epoch=before.epoch,
        epochs=before.epoch + config["epochs"],
        verbose=2,
        callbacks=[tfd.ray.ReportCallback()],
        checkpoint_dir=Path(config["folder"], "fit"),
    )


def run(function, storage, name, workers=2, failures=2, datasets=None, **config):
    """Runs Ray Train. All nodes must see the storage. The same name resumes a run."""
    trainer = TensorflowTrainer(
        function,
        train_loop_config={"folder": str(Path(storage, name)), **config},
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(
            name=name,
            storage_path=str(storage),
            failure_config=FailureConfig(max_failures=failures),
        ),
        datasets=datasets,
    )
    return trainer.fit()


def on_arrays(storage):
    result = run(train, storage, "arrays", epochs=3)
    print(f"epoch {result.metrics['epoch'] + 1} of arrays: loss {result.metrics['loss']:.4f}")
    further = run(
        train_further, storage, "further", workers=1, epochs=2, checkpoint=result.checkpoint
    )
    print(f"epoch {further.metrics['epoch'] + 1} further: loss {further.metrics['loss']:.4f}")


def on_shards(storage, batch=BATCH):
    ray.data.DataContext.get_current().enable_progress_bars = False
    x, y = examples()
    data = ray.data.from_items([{"x": a, "y": b} for a, b in zip(x, y, strict=True)])
    result = run(
        train_on_shards, storage, "shards", datasets={"train": data}, epochs=3, batch=batch
    )
    print(f"epoch {result.metrics['epoch'] + 1} of shards: loss {result.metrics['loss']:.4f}")


def main(storage="runs/ray_train", kind="arrays"):
    ray.init(num_cpus=None if "RAY_ADDRESS" in os.environ else 4)  # of this machine
    {"arrays": on_arrays, "shards": on_shards}[kind](Path(storage).absolute())
    ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
