"""A coordinator with its worker and parameter servers in one process: from 2 servers to 3.

Argument: a directory for files, with "one_device.safetensors", a checkpoint to begin with.
"""

import sys
from pathlib import Path

import keras
import numpy as np
import own_servers
import tensorflow as tf
from tables import BATCH, build, data

import tfdist_ext as tfd
from tfdist_ext.training import _keras_private
from tfdist_ext.training.state import state_of, whole_value

folder = Path(sys.argv[1])
result = {}
x, y = data()
FIT = {"batch_size": BATCH, "verbose": 0}

cluster, servers = own_servers.serve(ps=3)
addresses = [*cluster.job_tasks("worker"), *cluster.job_tasks("ps")]


def on(servers, shards=None):
    """The model on the first of the parameter servers, its variables cut into shards."""
    jobs = tf.train.ClusterSpec({"worker": addresses[:1], "ps": addresses[1 : 1 + servers]})
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(jobs, rpc_layer="grpc")
    partitioners = tf.distribute.experimental.partitioners
    strategy = tf.distribute.ParameterServerStrategy(
        resolver, variable_partitioner=shards and partitioners.FixedShardsPartitioner(shards)
    )
    return tfd.distribute(build, strategy)


def state(model):
    return {
        name: whole_value(variable)
        for name, variable in state_of(model.keras_model).items()
        if not name.startswith("metrics/")  # they are made when the first batch comes
    }


def pieces(model):
    """Rows of the table's pieces, and the servers where they are."""
    raw = _keras_private.raw_value(model.keras_model.weights[0])
    return [[piece.shape[0], piece.device.split("/")[3]] for piece in raw.variables]


two = on(2, shards=2)
two.restore_checkpoint(folder / "one_device.safetensors")
np.savez(folder / "restored.npz", **state(two))
result["two"] = pieces(two)
history = two.fit(x, y, epochs=2, checkpoint_dir=folder / "D", **FIT)
two.save_checkpoint(folder / "two.safetensors")
expected = state(two)

three = on(3, shards=3)
three.restore_checkpoint(folder / "two.safetensors")
result["three"] = pieces(three)
found = state(three)
result["differ_on_three"] = [n for n in expected if not np.array_equal(expected[n], found[n])]

# What Keras's callbacks and exports make of pieces.
callbacks = [
    keras.callbacks.ModelCheckpoint(folder / "model.keras"),
    keras.callbacks.ModelCheckpoint(folder / "a.weights.h5", save_weights_only=True),
    keras.callbacks.EarlyStopping("loss", restore_best_weights=True),
    keras.callbacks.TensorBoard(folder / "board", histogram_freq=1),
    keras.callbacks.CSVLogger(folder / "log.csv"),
]
three.fit(x, y, initial_epoch=2, epochs=3, callbacks=callbacks, **FIT)
three.save(folder / "saved.keras")
three.export(folder / "exported", verbose=False)
np.savez(folder / "three.npz", **state(three))
three.save_checkpoint(folder / "three.safetensors")


whole = on(3)
whole.restore_checkpoint(folder / "two.safetensors")
found = state(whole)
result["differ_on_whole"] = [n for n in expected if not np.array_equal(expected[n], found[n])]
history = whole.fit(x, y, epochs=4, checkpoint_dir=folder / "D", **FIT)
result["resumed_on_three"] = [history.epoch, int(whole.keras_model.optimizer.iterations.numpy())]
