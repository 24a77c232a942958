"""One script for all tasks: the chief trains, servers serve, the evaluator evaluates."""

import json
import sys

import keras
import mlp

import tfdist_ext as tfd

EPOCHS = 3


def main() -> str:
    strategy = tfd.create_strategy()
    print(tfd.explain(strategy), flush=True)
    x, y = mlp.data()
    keras.utils.set_random_seed(3)
    model = tfd.distribute(mlp.build, strategy)
    history = model.fit(
        x[:144],
        y[:144],
        batch_size=24,
        epochs=EPOCHS,
        validation_data=(x[144:], y[144:]),
        checkpoint_dir=sys.argv[1],
        verbose=1,
    )
    print("RESULT", json.dumps(history.history), flush=True)
    return "trained"


print("run returned", tfd.run(main), flush=True)
