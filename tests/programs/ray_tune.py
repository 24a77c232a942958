"""Ray Tune trains a Keras model, plain and distributed, with Ray's own callback for Keras.

Argument: a folder. Writes the reports of both trials into it.
"""

import json
import sys
from pathlib import Path
from typing import Any

import ray
from ray import tune

ROWS, BATCH, EPOCHS = 50, 16, 3


def train(config: dict[str, Any]) -> None:
    import tfdist_ext as tfd

    is_distributed = config["is_distributed"]
    strategy = tfd.create_strategy("mirrored", logical_cpus=2) if is_distributed else None
    import keras
    from ray.tune.integration.keras import TuneReportCheckpointCallback

    keras.utils.set_random_seed(1)
    layers = keras.Input((5,)), keras.layers.Dense(3, "tanh"), keras.layers.Dense(1)
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
    if strategy is not None:
        tfd.distribute(model, strategy)
    callback = TuneReportCheckpointCallback()
    options = {"batch_size": BATCH, "epochs": EPOCHS, "validation_data": examples(), "verbose": 0}
    model.fit(*examples(), shuffle=False, callbacks=[callback], **options)
    assert callback.model is model
    assert isinstance(callback.model, tfd.DistributedModel) == is_distributed


def examples() -> tuple[Any, Any]:
    import numpy as np

    x = np.random.default_rng(0).normal(size=(ROWS, 5)).astype("float32")
    return x, x.sum(axis=1, keepdims=True)


def main(folder: Path) -> None:
    ray.init("local", num_cpus=2, include_dashboard=False)
    tuner = tune.Tuner(
        train,
        param_space={"is_distributed": tune.grid_search([False, True])},
        run_config=tune.RunConfig(storage_path=str(folder)),
    )
    results = tuner.fit()
    ray.shutdown()
    assert not results.errors, results.errors
    import keras

    trials = []
    for result in results:
        model = keras.saving.load_model(Path(result.checkpoint.path, "model.keras"))
        loss, _ = model.evaluate(*examples(), verbose=0)
        trials.append({**result.config, **result.metrics_dataframe.to_dict("list"), "loaded": loss})
    (folder / "result.json").write_text(json.dumps(trials))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
