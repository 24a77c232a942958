"""A training on TFRecords by the workers of a cluster, which may be killed and gone on with; and
one on data that each worker reads for itself.

Arguments: the pattern of the files, a folder for checkpoints, the step at which the last worker is
killed (0: never), and 1 for workers that share the optimizer.
"""

import json
import os
import signal
import sys

import numpy as np
import sharded_case as case

import tfdist_ext as tfd

pattern, folder, kill_at, shares = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4] == "1"
cluster = tfd.ClusterConfig.from_env()
is_last = cluster.task.index == len(cluster.jobs["worker"]) - 1


def kill(step):
    if step == kill_at and is_last:
        os.kill(os.getpid(), signal.SIGKILL)


strategy = tfd.create_strategy(shard_optimizer=shares)
data = tfd.data.from_tfrecords(pattern, case.parse, global_batch_size=case.BATCH, seed=11)
model = tfd.distribute(case.build, strategy)
curve = case.Curve(kill)
model.fit(
    data,
    epochs=case.EPOCHS,
    checkpoint_dir=folder,
    checkpoint_every=4,
    callbacks=[curve],
    verbose=0,
)
result = {
    "losses": curve.losses,
    "weights": [w.tolist() for w in model.keras_model.get_weights()],
    "bytes": data.source.bytes_read,
    "place": data.position,
}


def by_function(**settings):
    """Workers whose data ends at different steps, in batches of different sizes."""
    model = tfd.distribute(case.build, strategy)
    for name, value in settings.items():
        setattr(model._tfdist_ext.reduction, name, value)
    data = tfd.data.from_dataset_fn(case.of_task)
    history = model.fit(data, epochs=2, verbose=0).history
    return {
        "history": history,
        "weights": [w.tolist() for w in model.keras_model.get_weights()],
        "evaluate": model.evaluate(data, verbose=0),
        "place": data.position,
    }, model


if len(cluster.jobs["worker"]) == 2 and not shares:
    result["by_function"], model = by_function()
    result["moved"], _ = by_function(feeds_on_host=False)  # as GPUs are fed
    try:
        model.predict(tfd.data.from_dataset_fn(case.of_task), verbose=0)
    except tfd.TrainingError as error:
        result["predict"] = str(error)
    # Workers that do not agree on their data: a seed of its own, a batch taken before, other rows.
    rows = np.arange(40.0)[:, None]

    def refused(data):
        try:
            model.fit(data, verbose=0)
        except (tfd.TrainingError, tfd.data.DataError) as error:
            return str(error)
        return "not refused"

    mine = cluster.task.index
    other_seed = tfd.data.from_arrays((rows, rows), global_batch_size=8, seed=mine)
    moved_on = tfd.data.from_arrays((rows, rows), global_batch_size=8, seed=1)
    moved_on.advance(1 - mine)
    other_rows = tfd.data.from_arrays((rows + mine, rows), global_batch_size=8, seed=1)
    result["refused"] = [refused(data) for data in (other_seed, moved_on, other_rows)]

    endless = tfd.data.from_dataset_fn(
        lambda shard: case.of_task(shard, 0).repeat(2 if shard.index else None)
    )
    result["endless"] = refused(endless)

print("RESULT " + json.dumps(result), flush=True)
