"""Measures the coordinator's peak memory while it creates, saves and restores an embedding.

The embedding is on parameter servers, and is restored under another plan.

Arguments: "tfdist_ext" or "tensorflow", and rows of 64 float32 numbers.
"""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"

from own_memory import mebibytes, reset_peak
from serving import serve

serve()

import keras  # noqa: E402
import tensorflow as tf  # noqa: E402

import tfdist_ext as tfd  # noqa: E402

WIDTH = 64
ours, rows = sys.argv[1] == "tfdist_ext", int(sys.argv[2])
servers = len(tfd.ClusterConfig.from_env().jobs["ps"])


@contextmanager
def peak_of(what) -> Iterator[None]:
    before = mebibytes("VmRSS")
    reset_peak()
    try:
        yield
    finally:
        print(f"peak of {what}: {max(mebibytes('VmHWM') - before, 0):.0f} MiB", flush=True)


def model(rows):
    ids = keras.Input([1], dtype="int32")
    table = keras.layers.Embedding(rows, WIDTH, embeddings_initializer="glorot_uniform")
    return keras.Model(ids, keras.layers.Dense(1)(table(ids)))


def strategy_of(pieces):
    if ours:
        rules = {".*/embeddings": f"sharded({pieces})"}
        return tfd.create_strategy("parameter_server", placement=rules)
    partitioner = tf.distribute.experimental.partitioners.FixedShardsPartitioner(pieces)
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    return tf.distribute.ParameterServerStrategy(resolver, variable_partitioner=partitioner)


def make(strategy, rows):
    if ours:
        return tfd.distribute(lambda: model(rows), strategy)
    with strategy.scope():
        return model(rows)


strategy = strategy_of(servers)
make(strategy, 1000)  # what TensorFlow loads at first use is no part of it
with peak_of("creation"):
    made = make(strategy, rows)
pieces = made.weights[0].value.variables
assert [piece.shape[0] for piece in pieces] == [rows // servers] * servers
assert len({piece.device for piece in pieces}) == servers

if ours:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "checkpoint.h5"
        with peak_of("save_checkpoint"):
            made.save_checkpoint(file)
        at = rows - 5
        expected = pieces[-1][at - rows].numpy()
        del made, pieces  # the servers hold no two tables
        made = make(strategy_of(1), rows)
        with peak_of("restore_checkpoint as a whole"):
            made.restore_checkpoint(file)
    whole = made.weights[0].value
    assert isinstance(whole, tf.Variable)
    assert (tf.gather(whole, at).numpy() == expected).all()
