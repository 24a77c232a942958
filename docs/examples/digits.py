"""Train a small convolutional network on images of digits. A TOML file sets the strategy.

python docs/examples/digits.py --config configs/digits_mirrored.toml
tfdist run --workers 2 -- python docs/examples/digits.py --config configs/digits_multi_worker.toml
tfdist run --workers 2 --ps 2 --evaluator -- \\
    python docs/examples/digits.py --config configs/digits_parameter_server.toml
"""

import json
import shutil
import time
import tomllib
from pathlib import Path

import digits_data
import keras
from absl import app, flags, logging
from rich.console import Console
from rich.table import Table

import tfdist_ext as tfd

FLAGS = flags.FLAGS
flags.DEFINE_string("config", "configs/digits_one_device.toml", "TOML file with all settings.")
flags.DEFINE_string("dataset", None, "digits, mnist or fashion_mnist. Overrides the file.")
flags.DEFINE_integer("epochs", None, "Number of epochs. Overrides the file.", lower_bound=1)
flags.DEFINE_string("output", None, "Output folder. Overrides the file.")
tfd.flags.define_strategy_flags()


class Clock(keras.callbacks.Callback):
    """Measures the seconds of all epochs after the first, which compiles."""

    def __init__(self):
        super().__init__()
        self.epochs, self.seconds = 0, 0.0

    def on_epoch_begin(self, epoch, logs=None):
        self._started = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        if epoch > 0:
            self.epochs += 1
            self.seconds += time.perf_counter() - self._started


def train():
    config = tomllib.loads(Path(FLAGS.config).read_text())
    settings = config["training"]
    dataset = FLAGS.dataset or settings["dataset"]
    output = Path(FLAGS.output or config["output"]["directory"])

    strategy = tfd.create_strategy(config=FLAGS.config)  # before TensorFlow starts
    keras.utils.set_random_seed(1)
    (x, y), (x_test, y_test) = digits_data.load(dataset)

    def build():
        model = keras.Sequential(
            [
                keras.Input(x.shape[1:]),
                keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
                keras.layers.MaxPooling2D(),
                keras.layers.Conv2D(64, 3, padding="same", activation="relu"),
                keras.layers.Flatten(),
                keras.layers.Dense(64, activation="relu"),
                keras.layers.Dense(10),
            ]
        )
        model.compile(
            keras.optimizers.Adam(settings["learning_rate"]),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
        return model

    model = tfd.distribute(build, strategy)
    clock = Clock()
    cluster = tfd.ClusterConfig.from_env()
    evaluator = cluster is not None and cluster.task.type == "evaluator"
    chief = strategy.extended.should_checkpoint and not evaluator
    checkpoints = config["output"].get("checkpoints")
    if chief:
        print(tfd.explain(strategy), flush=True)
        shutil.rmtree(output / "events", ignore_errors=True)
    model.fit(
        x,
        y,
        batch_size=settings["global_batch_size"],
        epochs=FLAGS.epochs or settings["epochs"],
        validation_data=(x_test, y_test) if evaluator else None,
        callbacks=[clock, keras.callbacks.TensorBoard(output / "events")],
        checkpoint_dir=checkpoints and output / checkpoints,
    )
    loss, accuracy = model.evaluate(x_test, y_test, batch_size=len(x_test), verbose=0)
    if chief:
        output.mkdir(parents=True, exist_ok=True)
    model.save(output / "model.keras")

    if chief:
        speed = clock.epochs * len(x) / clock.seconds if clock.epochs else float("nan")
        why = tfd.explain(strategy)
        table = Table("strategy", "because", "replicas", "examples/s", "test accuracy")
        row = (why.strategy, why.reason, str(why.replicas), f"{speed:,.0f}", f"{accuracy:.4f}")
        table.add_row(*row)
        Console(width=None if Console().is_terminal else 140).print(table)
        result = {"dataset": dataset, "test_loss": loss, "test_accuracy": accuracy}
        (output / "result.json").write_text(json.dumps(result))
    if accuracy < settings["minimum_accuracy"]:
        raise SystemExit(f"test accuracy {accuracy:.4f} is below {settings['minimum_accuracy']}")


def main(argv):
    del argv
    logging.set_verbosity(logging.WARNING)  # app.run turns on TensorFlow's INFO messages
    tfd.run(train)  # runs a server in ps tasks and their workers


if __name__ == "__main__":
    app.run(main)
